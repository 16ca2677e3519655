"""Prefix index: which full block holds the KV of which token prefix.

A block's key is a hash chained from the first block on, so equal keys mean equal prefixes (the idea of vLLM's automatic
prefix caching; SGLang's radix tree, arXiv 2312.07104, answers the same question). A salt on the first block separates
tenants: the chain carries it to all the others.
"""

import hashlib
from collections.abc import Iterable

import numpy as np


def root_key(salt: str | None) -> bytes:
    """Start of the chain. Tagged, so that no salt can equal the unsalted root."""
    return hashlib.sha256(b"root" if salt is None else b"salt:" + salt.encode()).digest()


def block_key(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """Key of the full block that holds `token_ids` after the prefix named by `parent`."""
    return hashlib.sha256(parent + np.asarray(token_ids, dtype=np.int64).tobytes()).digest()


def short(key: bytes) -> int:
    """48 bits of a key, for traces."""
    return int.from_bytes(key[:6], "big")


class PrefixIndex:
    """key <-> block, one block per key: a second block with the same content stays out."""

    def __init__(self):
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `keys`."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, key: bytes, block: int) -> bool:
        """True if the block is now the one that holds `key`."""
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def drop(self, block: int) -> None:
        """Forget a block that is about to be reused. No error if it was never in."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
