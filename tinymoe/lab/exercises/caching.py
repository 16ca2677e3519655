"""Exercises on the KV cache: how big it is, what it saves, and how a shared block is written."""

import copy
import random

from tinymoe.core.model_config import LayerConfig, ModelConfig
from tinymoe.lab.exercises.judge import Verdict, agree, attempt, same, shown


def bytes_per_token(answer) -> Verdict:
    """08.1: kv_bytes_per_token(layers, query_heads, kv_heads, head_width, bytes_per_number) -> bytes of one token's keys
    and values in all layers. The judge is ModelConfig.kv_elements_per_token, which sizes the engine's cache.
    """

    def reference(
        layers: int, query_heads: int, kv_heads: int, head_width: int, bytes_per_number: int
    ) -> int:
        config = ModelConfig(
            model_type="qwen3",
            vocab_size=256,
            hidden_size=64,
            num_attention_heads=query_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_width,
            layers=(LayerConfig(intermediate_size=64),) * layers,
            max_position_embeddings=128,
        )
        return config.kv_elements_per_token * bytes_per_number

    r = random.Random(8)
    cases = [(1, 1, 1, 2, 1), (1, 2, 1, 2, 1), (6, 6, 2, 32, 4)]
    while len(cases) < 50:
        kv_heads = r.choice([1, 2, 4, 8])
        query_heads = kv_heads * r.choice([1, 2, 4])
        cases.append(
            (r.randint(1, 64), query_heads, kv_heads, r.choice([32, 64, 96, 128]), r.choice([1, 2, 4]))
        )
    return agree("kv_bytes_per_token", answer, reference, cases)


def tokens_computed(answer) -> Verdict:
    """08.2: tokens_computed(prompt, new) -> (without a cache, with it): tokens run to read a prompt and generate `new`
    tokens. The judge counts step by step; the last generated token is never run.
    """

    def reference(prompt: int, new: int) -> tuple[int, int]:
        known, without, with_cache, cached = prompt, 0, 0, 0
        for _ in range(new):
            without += known
            with_cache += known - cached
            cached = known
            known += 1
        return without, with_cache

    r = random.Random(82)
    cases = [(1, 1), (1, 2), (10, 1), (10, 3)]
    cases += [(r.randint(1, 300), r.randint(1, 300)) for _ in range(46)]
    return agree("tokens_computed", answer, reference, cases)


def copy_on_write(answer) -> Verdict:
    """10.2: before_write(table, index, refs, free): a sequence will write into page `index` of its block `table`.

    If other sequences own that block too, it takes the last block of the list `free`, leaves the old one to them, and
    returns (old, new); else nothing changes and it returns None. table, refs (owners of each block) and free are lists
    changed in place.
    """
    if not callable(answer):
        return Verdict(False, f"write a function before_write, got {type(answer).__name__}")

    def reference(table: list[int], index: int, refs: list[int], free: list[int]) -> tuple[int, int] | None:
        old = table[index]
        if refs[old] == 1:
            return None
        new = free.pop()
        table[index], refs[old], refs[new] = new, refs[old] - 1, 1
        return old, new

    r = random.Random(102)
    games = 50
    for game in range(games):
        pages = r.randint(1, 1 + game // 8)
        owners = [r.choice([1, 2, 3]) for _ in range(pages)] if game else [2]
        total = pages + r.randint(1, 3)
        blocks = r.sample(range(total), pages)
        refs = [owners[blocks.index(b)] if b in blocks else 0 for b in range(total)]
        free = [b for b in range(total) if b not in blocks]
        state = {"table": blocks, "refs": refs, "free": free}
        for index in [pages - 1, r.randrange(pages)]:
            call = f"before_write(table={shown(state['table'])}, index={index}, refs={shown(state['refs'])}, free={shown(state['free'])})"
            truth, mine = copy.deepcopy(state), copy.deepcopy(state)
            if not truth["free"]:
                break
            expected = reference(truth["table"], index, truth["refs"], truth["free"])
            got, failure = attempt(lambda i=index, m=mine: answer(m["table"], i, m["refs"], m["free"]))
            if failure:
                return Verdict(False, f"{call} {failure}; it should return {shown(expected)}")
            if got is not None and isinstance(got, list):
                got = tuple(got)
            if not same(got, expected):
                return Verdict(False, f"{call} should return {shown(expected)}, got {shown(got)}")
            for name, value in truth.items():
                if not same(mine[name], value):
                    return Verdict(
                        False, f"after {call} {name} should be {shown(value)}, it is {shown(mine[name])}"
                    )
            state = truth
    return Verdict(True, f"{games} cases agree")
