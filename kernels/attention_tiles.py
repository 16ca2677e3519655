"""Which tile and which split paged attention takes, as measured on an H200. Plain arithmetic, no kernel.

A tile is rows (query tokens times the heads of one group) by positions; a split is how many positions one program walks
before its part is merged with the others. All depends on bounds that a captured graph knows.
"""

from typing import NamedTuple

WHOLE = 1 << 30  # a split that no context fills
INVARIANT_SPLIT = 512
SHORT_SPLITS = (128, 256, 512, 1024, 2048, 4096)  # the last bounds how long one program works
CHUNK_SPLITS = (1024, 2048, 4096, 8192, 16384)
SHORT_WINDOW = 256  # a window this short is not worth a merge
SHORT_PROGRAMS = 528  # about as many programs as keep an H200 busy: 4 for each of 132 multiprocessors
CHUNK_PROGRAMS = 264


class Tile(NamedTuple):
    """rows (query tokens × heads of one group), positions a step, and how the compiler lays them out."""

    rows: int
    positions: int
    warps: int
    stages: int


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# Stages: a block's number is loaded one stage before its keys, so five stages hold two tiles of keys and of values.
def short_tile(head_dim: int, group: int, rows: int, wide: bool) -> Tile:
    """For sequences of at most `rows` rows: bound by bandwidth. wide: float32, which has no tensor cores."""
    fit = max(16 if rows <= 16 else 64, power_of_2(group))
    if wide:
        return Tile(max(16, power_of_2(group)), 16 if head_dim == 128 else 32, 4, 2)
    if fit <= 32:
        return Tile(fit, 64, 8, 5) if head_dim == 128 else Tile(fit, 128, 4, 5)
    return Tile(fit, 64, max(4, fit // 16), 3 if head_dim == 128 else 5)


def chunk_tile(head_dim: int, group: int, wide: bool) -> Tile:
    """For chunks: bound by arithmetic."""
    if wide:
        return short_tile(head_dim, group, 16, wide)
    rows = max(128, power_of_2(group))
    return Tile(rows, 64 if head_dim == 128 else 128, rows // 16, 5)


def invariant_tile(head_dim: int, group: int, wide: bool) -> Tile:
    """For all sequences alike; two accumulators must fit into the registers."""
    if wide:
        return short_tile(head_dim, group, 16, wide)
    rows = max(64, power_of_2(group))
    return Tile(rows, 32 if head_dim == 128 else 64, rows // 16, 5)


def split_for(programs: int, max_context: int, sizes: tuple[int, ...], enough: int, otherwise: int) -> int:
    """The smallest split that keeps the number of programs at `enough`."""
    fitting = (size for size in sizes if programs * ceil_div(max_context, size) <= enough)
    return next(fitting, otherwise)
