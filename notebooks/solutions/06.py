"""Reference solutions of notebook 06, and answers that must be refused. Injected by tests/test_exercises.py."""

SILU = """# needs triton
@triton.jit
def silu_and_mul(gate, up, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(gate + i, mask=inside)
    u = tl.load(up + i, mask=inside)
    tl.store(out + i, g * tl.sigmoid(g) * u, mask=inside)
"""

MEAN = """# needs triton
@triton.jit
def row_mean(x, out, stride, C, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        acc += tl.load(x + row * stride + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(acc, 0) / C)
"""

SUM = """# needs triton
@triton.jit
def sum_kernel(y, out, H, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in range(K):
        acc += tl.load(y + (token * K + j) * H + h, mask=h < H, other=0.0)
    tl.store(out + token * H + h, acc, mask=h < H)


def add_up(y, out):
    T, K, H = y.shape
    sum_kernel[(T, triton.cdiv(H, 16))](y, out, H, K=K, BLOCK=16)
"""

# A tile of K rows at once: here K is padded to a power of two, and the sum runs over the tile's first axis.
TILE = """# needs triton
@triton.jit
def sum_kernel(y, out, H, K: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr):
    token = tl.program_id(0)
    j, h = tl.arange(0, KP), tl.arange(0, HP)
    inside = (j[:, None] < K) & (h[None, :] < H)
    tile = tl.load(y + (token * K + j[:, None]) * H + h[None, :], mask=inside, other=0.0)
    tl.store(out + token * H + h, tl.sum(tile, 0), mask=h < H)


def add_up(y, out):
    T, K, H = y.shape
    KP, HP = triton.next_power_of_2(K), triton.next_power_of_2(H)
    sum_kernel[(T,)](y, out, H, K=K, KP=KP, HP=HP)
"""

SOLUTIONS = {"06.1": SILU, "06.2": MEAN, "06.3": SUM}

WRONG = {
    "06.1": [
        # the mask is forgotten
        SILU.replace(", mask=inside", ""),
        # masked loads, but the store is not
        SILU.replace("g * tl.sigmoid(g) * u, mask=inside", "g * tl.sigmoid(g) * u"),
        # the offset is forgotten: every program works on the first block
        SILU.replace("tl.program_id(0) * BLOCK + ", ""),
        # the offset lacks the block: programs overlap
        SILU.replace("tl.program_id(0) * BLOCK + ", "tl.program_id(0) + "),
        # the mask is one short
        SILU.replace("i < n", "i < n - 1"),
        # the mask looks at the lane, not at the element
        SILU.replace("i < n", "tl.arange(0, BLOCK) < n"),
        # silu of the wrong half
        SILU.replace("g * tl.sigmoid(g) * u", "u * tl.sigmoid(u) * g"),
        # the sigmoid alone
        SILU.replace("g * tl.sigmoid(g) * u", "tl.sigmoid(g) * u"),
    ],
    "06.2": [
        # the rows are taken to lie side by side
        MEAN.replace("row * stride", "row * C"),
        # the sum is kept in float16
        MEAN.replace("tl.float32", "tl.float16"),
        # the lanes are kept in float16, only their sum is not
        MEAN.replace("tl.float32", "tl.float16").replace("tl.sum(acc, 0)", "tl.sum(acc.to(tl.float32), 0)"),
        # each block is summed in float16
        """# needs triton
@triton.jit
def row_mean(x, out, stride, C, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + row * stride + c, mask=c < C, other=0.0), 0)
    tl.store(out + row, tl.sum(total, 0) / C)
""",
        # the result is rounded to float16
        MEAN.replace("tl.sum(acc, 0) / C", "(tl.sum(acc, 0) / C).to(tl.float16)"),
        # what is masked off is whatever the register held
        MEAN.replace(", other=0.0", ""),
        # a block of its own size
        MEAN.replace("range(0, C, BLOCK)", "range(0, C, 1024)")
        .replace("arange(0, BLOCK)", "arange(0, 1024)")
        .replace("(BLOCK,)", "(1024,)"),
        # the mask is forgotten
        MEAN.replace(", mask=c < C, other=0.0", ""),
        # what is masked off counts as 1
        MEAN.replace("other=0.0", "other=1.0"),
        # the last block is overwritten instead of added to
        MEAN.replace("acc += ", "acc = "),
        # only the first block
        MEAN.replace("range(0, C, BLOCK)", "range(0, BLOCK, BLOCK)"),
        # the mean of the lanes, not of the columns
        MEAN.replace("/ C", "/ BLOCK"),
        # the columns are a stride apart
        MEAN.replace("row * stride + c", "row + c * stride"),
        # every program writes the first row
        MEAN.replace("out + row", "out"),
    ],
    "06.3": [
        # a race: one program for each row of y reads out, adds, and writes back; the interpreter's numbers are right
        """# needs triton
@triton.jit
def race_kernel(y, out, H, K: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    h = tl.arange(0, BLOCK)
    place = out + (pair // K) * H + h
    mine = tl.load(y + pair * H + h, mask=h < H)
    tl.store(place, tl.load(place, mask=h < H) + mine, mask=h < H)


def add_up(y, out):
    T, K, H = y.shape
    out.zero_()
    race_kernel[(T * K,)](y, out, H, K=K, BLOCK=triton.next_power_of_2(H))
""",
        # atomics: no sum is lost, but their order is chance
        """# needs triton
@triton.jit
def race_kernel(y, out, H, K: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    h = tl.arange(0, BLOCK)
    tl.atomic_add(out + (pair // K) * H + h, tl.load(y + pair * H + h, mask=h < H), mask=h < H)


def add_up(y, out):
    T, K, H = y.shape
    out.zero_()
    race_kernel[(T * K,)](y, out, H, K=K, BLOCK=triton.next_power_of_2(H))
""",
        # both blocks of features write the whole row
        SUM.replace("tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)").replace(
            "BLOCK=16", "BLOCK=triton.next_power_of_2(H)"
        ),
        # only one block of features is started
        SUM.replace("(T, triton.cdiv(H, 16))", "(T, 1)"),
        # the rows of y are taken to lie slot by slot
        SUM.replace("(token * K + j) * H", "(j * tl.num_programs(0) + token) * H"),
        # the sum runs over the wrong axis of the tile
        TILE.replace("tl.sum(tile, 0)", "tl.sum(tile, 1)").replace(
            "next_power_of_2(K), triton.next_power_of_2(H)",
            "next_power_of_2(max(K, H)), triton.next_power_of_2(max(K, H))",
        ),
        # the padded slots of the tile are not masked
        TILE.replace("(j[:, None] < K) & (h[None, :] < H)", "(j[:, None] < KP) & (h[None, :] < H)"),
        # no kernel at all
        """# needs triton
def add_up(y, out):
    out.copy_(y.sum(1))
""",
    ],
}
