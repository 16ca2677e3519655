"""The other ways to run the experts, dense with a mask and block-sparse, against a loop in float64: interpreted on a CPU
(TRITON_INTERPRET=1, float32, tiny), or on a GPU. Buffers that kernels write are poisoned before."""

import os

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton exists for Linux only")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (make kernels)", allow_module_level=True)

from tinymoe.kernels import blocked_sparse, dense_masked, expert_paths
from tinymoe.kernels.fused_moe import DecodeTile, Plan
from tinymoe.kernels.grouped_gemm import Tile
from tinymoe.kernels.sort_tokens import sort_tokens
from tinymoe.ops import reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NAN = float("nan")
SWAPPED = (16, Tile(64, 32, 4, 2, swap=True), Tile(64, 32, 4, 2, swap=True))
PLAIN = (16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
BLOCKED = (16, Tile(16, 32, 4, 2, group=2), Tile(32, 16, 4, 2, group=3))
WAYS = {
    "dense, swapped": lambda *a, **o: dense_masked.dense_masked(*a, tiles=SWAPPED, **o),
    "dense": lambda *a, **o: dense_masked.dense_masked(*a, tiles=PLAIN, **o),
    "blocked": lambda *a, **o: blocked_sparse.blocked_sparse(*a, tiles=BLOCKED, **o),
}
REFERENCES = [
    reference.dense_masked,
    lambda *a, **o: reference.blocked_sparse(*a, block=16, **o),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Whatever a launcher takes with torch.empty holds NaN, or a number that is no index."""
    empty = torch.empty

    def poisoned(*shape, **options):
        t = empty(*shape, **options)
        return t.fill_(NAN) if t.is_floating_point() else t.fill_(-(10**9))

    for module in (dense_masked, blocked_sparse):
        monkeypatch.setattr(module.torch, "empty", poisoned)


def normal(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def layer(T, E, H, I):
    x = normal(T, H, seed=1)
    return x, normal(E, 2 * I, H, seed=3, scale=H**-0.5), normal(E, H, I, seed=4, scale=I**-0.5)


def routes(T, E, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(E, generator=generator)[:k] for _ in range(T)]
    ids = torch.stack(rows) if rows else torch.zeros(0, k)
    return ids.to(torch.int32).to(DEVICE), normal(T, k, seed=7)


def loop_moe(x, ids, weights, gate_up, down, residual=None, shared=None):
    """Token by token, expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    width = down.shape[2]
    for t, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            if 0 <= e < down.shape[0]:
                a = gate_up[e].double() @ x[t].double()
                out[t] += weights[t, j].double() * (down[e].double() @ (F.silu(a[:width]) * a[width:]))
    for more in (residual, shared):
        out += 0 if more is None else more.double()
    return out


SHAPES = [  # T, E, k, H, I
    (0, 3, 2, 16, 16),
    (1, 1, 1, 16, 16),
    (3, 3, 2, 24, 20),
    (6, 8, 8, 33, 17),
    (16, 5, 1, 48, 40),
    (7, 5, 2, 64, 32),
]
if ON_GPU:
    SHAPES += [(33, 60, 4, 257, 100), (130, 16, 2, 256, 96), (5, 257, 8, 128, 64), (2, 64, 64, 64, 32)]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_layer_is_a_loop_over_tokens_and_experts(name, shape):
    T, E, k, H, I = shape
    x, gate_up, down = layer(T, E, H, I)
    ids, weights = routes(T, E, k)
    if T == 16:
        ids[:] = E - 1  # one expert takes all, the others none
    residual = normal(T, H, seed=5) if T % 2 else None
    shared = normal(T, H, seed=6) if T > 5 else None
    wanted = loop_moe(x, ids, weights, gate_up, down, residual, shared)
    for way in (WAYS[name], *REFERENCES):
        out = way(x, ids, weights, gate_up, down, residual, shared)
        assert out.shape == x.shape
        assert torch.allclose(out.double(), wanted, atol=3e-5)


@pytest.mark.parametrize("name", WAYS)
def test_pairs_of_nobody_cost_nothing_and_spoil_nothing(name):
    """Padded rows of a CUDA graph carry id -1 and NaN; experts without tokens hold NaN."""
    x, gate_up, down = layer(6, 5, 32, 24)
    ids = torch.tensor([[0, 3], [-1, -1], [3, 0], [0, -1], [5, 3], [-1, -1]], dtype=torch.int32).to(DEVICE)
    weights = normal(6, 2, seed=7)
    wanted = loop_moe(x, ids, weights, gate_up, down)
    x[1], x[5], weights[1], weights[5] = NAN, NAN, NAN, NAN
    gate_up[[1, 2, 4]], down[[1, 2, 4]] = NAN, NAN
    out = WAYS[name](x, ids, weights, gate_up, down)
    assert torch.allclose(out.double(), wanted, atol=3e-5)
    nobody = WAYS[name](x, torch.full_like(ids, -1), weights, gate_up, down)
    assert torch.equal(nobody, torch.zeros_like(nobody))


@pytest.mark.parametrize("name", WAYS)
def test_a_token_with_nan_leaves_the_others_alone(name):
    x, gate_up, down = layer(3, 3, 32, 16)
    ids, weights = routes(3, 3, 2)
    wanted = WAYS[name](x, ids, weights, gate_up, down)
    x[1] = NAN
    out = WAYS[name](x, ids, weights, gate_up, down)
    assert torch.equal(out[[0, 2]], wanted[[0, 2]])
    assert out[1].isnan().all()


@pytest.mark.parametrize("name", WAYS)
def test_an_expert_named_twice_counts_twice(name):
    x, gate_up, down = layer(2, 3, 16, 16)
    ids = torch.tensor([[1, 1], [2, 0]], dtype=torch.int32, device=DEVICE)
    weights = normal(2, 2, seed=7)
    wanted = loop_moe(x, ids, weights, gate_up, down)
    assert torch.allclose(WAYS[name](x, ids, weights, gate_up, down).double(), wanted, atol=3e-5)


@pytest.mark.parametrize("name", WAYS)
def test_weights_beyond_two_gigabytes(name):
    """The last expert lies 2^31 elements away: 32-bit offsets would wrap. The memory between is never touched."""
    if ON_GPU and torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB")
    far = 2**31 + 64
    x, gate_up, down = layer(2, 2, 16, 16)
    ids, weights = routes(2, 2, 2)
    spread = []
    for t in (gate_up, down):
        room = torch.UntypedStorage((far + t[0].numel()) * t.element_size(), device=DEVICE)
        view = torch.tensor([], dtype=t.dtype, device=DEVICE).set_(room, 0, t.shape, (far, t.shape[2], 1))
        spread.append(view.copy_(t))
    out = WAYS[name](x, ids, weights, *spread)
    assert torch.equal(out, WAYS[name](x, ids, weights, gate_up, down))


@pytest.mark.skipif(ON_GPU, reason="products are counted by the interpreter")
def test_an_expert_that_no_token_of_a_tile_chose_is_left_unread(monkeypatch):
    """Tiles of 16 tokens: the first meets experts 0 and 2, the second expert 4."""
    calls, multiply = [], dense_masked.multiply
    monkeypatch.setattr(dense_masked, "multiply", lambda *a: calls.append(1) or multiply(*a))
    x, gate_up, down = layer(18, 5, 32, 32)
    ids = torch.tensor([[0], [2]] * 8 + [[4]] * 2, dtype=torch.int32)
    dense_masked.dense_masked(x, ids, torch.ones(18, 1), gate_up, down, tiles=PLAIN)
    assert len(calls) == 3 * (2 + 1)  # gate and up, and down, each one step of 32


# The layout


@pytest.mark.parametrize(("E", "T", "block", "width"), [(1, 1, 16, 16), (5, 9, 16, 40), (3, 33, 16, 16), (4, 0, 32, 32), (8, 20, 32, 33)])  # fmt: skip
def test_the_topology_is_that_of_the_counts(E, T, block, width):
    ids = torch.randint(-1, E, (T, 2), generator=torch.Generator().manual_seed(E)).int()
    counts = torch.bincount(ids[ids >= 0].long(), minlength=E)
    s = sort_tokens(ids.to(DEVICE), E, block)
    t = blocked_sparse.topology(s, width)
    # By hand: a row of blocks for each `block` rows of an expert, and in it that expert's columns.
    per_expert = -(-width // block)
    rows = [e for e, n in enumerate(counts.tolist()) for _ in range(-(-n // block))]
    wanted = [e * per_expert + c for e in rows for c in range(per_expert)]
    offsets = [r * per_expert for r in range(len(rows) + 1)]
    assert t.row_offsets.tolist() == offsets + [len(wanted)] * (len(t.row_offsets) - len(offsets))
    assert t.column_indices[: len(wanted)].tolist() == wanted
    assert [x.tolist() for x in reference.bcsr_topology(counts, width, block)] == [offsets, wanted]


def test_bcsr_there_and_back():
    counts, block, width, E = torch.tensor([3, 0, 17, 1]), 16, 40, 4
    row_offsets, columns = reference.bcsr_topology(counts, width, block)
    values = normal(len(columns), block, block).cpu()
    dense = reference.bcsr_to_dense(values, row_offsets, columns, E * 3)
    assert dense.shape == (4 * block, E * 3 * block)
    back = dense.view(4, block, E * 3, block).transpose(1, 2)  # [row, column, block, block]
    row = torch.repeat_interleave(torch.arange(4), row_offsets.diff())
    assert torch.equal(back[row, columns], values)
    back = back.clone()
    back[row, columns] = 0
    assert not back.any()


def test_sdd_fills_blocks_with_zeros_and_dsd_reads_what_bcsr_says():
    """SDD's blocks, laid out densely, are the masked product; DSD of blocks drawn at random is the product with them."""
    T, E, k, H, I, block = 5, 3, 2, 32, 24, 16
    x, gate_up, down = layer(T, E, H, I)
    ids, weights = routes(T, E, k)
    s = sort_tokens(ids, E, block)
    t = blocked_sparse.topology(s, I)
    h = torch.full((len(t.column_indices), block, block), NAN, device=DEVICE)
    blocked_sparse.sdd(x, gate_up, s, t, h, k, BLOCKED[1])
    R, per = int(s.num_tiles), t.per_expert
    dense = reference.bcsr_to_dense(h, t.row_offsets[: R + 1], t.column_indices, E * per)
    wanted = torch.zeros_like(dense)
    for r, (e, first) in enumerate(zip(s.tile_expert[:R].tolist(), s.tile_row[:R].tolist())):
        pairs = s.order[first : min(first + block, int(s.offsets[e + 1]))].long()
        gate, up = (x[pairs // k] @ gate_up[e].T).chunk(2, -1)
        wanted[r * block : r * block + len(pairs), e * per * block : e * per * block + I] = F.silu(gate) * up
    assert torch.allclose(dense, wanted, atol=1e-5)
    h[: R * per] = normal(R * per, block, block, seed=9)
    y = torch.full((T * k, H), NAN, device=DEVICE)
    blocked_sparse.dsd(h, down, weights, s, t, y, BLOCKED[2])
    wide = F.pad(down, (0, per * block - I)).transpose(1, 2).reshape(-1, H)  # [E * per * block, H]
    product = reference.bcsr_to_dense(h, t.row_offsets[: R + 1], t.column_indices, E * per) @ wide
    for r, (e, first) in enumerate(zip(s.tile_expert[:R].tolist(), s.tile_row[:R].tolist())):
        pairs = s.order[first : min(first + block, int(s.offsets[e + 1]))].long()
        rows = product[r * block : r * block + len(pairs)] * weights.reshape(-1)[pairs, None]
        assert torch.allclose(y[pairs], rows, atol=1e-5)


def test_padding_is_stored_over_real_rows():
    counts = torch.tensor([1, 0, 16, 17])
    assert blocked_sparse.padding(counts, 16).item() == pytest.approx((16 + 16 + 32) / 34)
    assert blocked_sparse.padding(counts, 1).item() == 1
    assert blocked_sparse.padding(torch.zeros(4, dtype=torch.int64), 16).item() == 1
    with pytest.raises(ValueError, match=r"block must be one of \(16, 32, 64, 128\), got 48"):
        blocked_sparse.block_tiles(48, torch.bfloat16)


@pytest.mark.skipif(not ON_GPU, reason="tiles of the real size")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 2, 192, 192), (8, 2, 512, 1024), (60, 4, 257, 100)])
def test_tiles_of_the_real_size(shape, dtype):
    E, k, H, I = shape
    for T in (1, 9, 33, 130, 700):
        x, gate_up, down = (t.to(dtype) for t in layer(T, E, H, I))
        ids, weights = routes(T, E, k)
        wanted = reference.dense_masked(x.float(), ids, weights, gate_up.float(), down.float())
        ways = [lambda *a: dense_masked.dense_masked(*a)]
        ways += [lambda *a, b=b: blocked_sparse.blocked_sparse(*a, block=b) for b in blocked_sparse.BLOCKS]
        if dtype is torch.bfloat16:
            ways += [
                lambda *a, t=t: dense_masked.dense_masked(*a, tiles=t)
                for t in (dense_masked.DENSE16, dense_masked.DENSE64)
            ]
        for i, way in enumerate(ways):
            out = way(x, ids, weights, gate_up, down)
            error = (out.float() - wanted).norm() / wanted.norm()
            assert error < (2e-5 if dtype is torch.float32 else 0.02), (T, i, error)


# By name


@pytest.mark.parametrize("path", expert_paths.PATHS)
def test_every_name_computes_the_layer(path, monkeypatch):
    """Padded rows included: they cost nothing and give residual alone."""
    if not ON_GPU:  # the same kernels with tiles that the interpreter gets through
        small = {"few": Plan(0, DecodeTile(4, 16, 4, 2), DecodeTile(4, 16, 4, 2)), "grouped": Plan(*PLAIN)}
        small |= {"dense": PLAIN, "blocked": BLOCKED}
        monkeypatch.setattr(expert_paths, "plan_of", lambda p, *_: small[p.rstrip("0123456789")])
    T, E, k, H, I = 4, 5, 2, 32, 16
    x, gate_up, down = layer(T, E, H, I)
    logits, residual = normal(T, E, seed=2), normal(T, H, seed=5)
    x[3], logits[3] = NAN, NAN
    valid = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    out, ids, weights = expert_paths.run(
        path, x, logits, gate_up, down, k, residual_TH=residual, num_valid=valid
    )
    assert torch.equal(ids[:3].long(), logits[:3].sort(dim=1, descending=True, stable=True).indices[:, :k])
    assert ids[3].tolist() == [-1, -1]
    assert torch.allclose(weights[:3], logits[:3].gather(1, ids[:3].long()).softmax(-1), atol=1e-6)
    wanted = loop_moe(x, ids, weights, gate_up, down, residual)
    assert torch.allclose(out.double(), wanted, atol=3e-5)


@pytest.mark.skipif(not ON_GPU, reason="tiles of the real size")
@pytest.mark.parametrize("path", expert_paths.PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_name_with_its_own_tiles(path, dtype):
    E, k, H, I = 16, 2, 256, 192
    for T in (1, 16, 100, 600):
        if expert_paths.serves(path, T, E, k):
            x, gate_up, down = (t.to(dtype) for t in layer(T, E, H, I))
            logits = normal(T, E, seed=2)
            out, *_ = expert_paths.run(path, x, logits, gate_up, down, k)
            wanted = reference.fused_moe(x.float(), logits, gate_up.float(), down.float(), k)[0]
            error = (out.float() - wanted).norm() / wanted.norm()
            assert error < (2e-5 if dtype is torch.float32 else 0.02), T


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="unknown expert path 'none'; known: few, grouped16"):
        expert_paths.run("none", normal(1, 16), normal(1, 2), normal(2, 32, 16), normal(2, 16, 16), 1)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("path", expert_paths.PATHS)
def test_graphs_of_every_path_can_be_replayed_on_other_routes(path, monkeypatch):
    """Captured at few tokens, then at many, then the first again: nothing waits for the host, nothing is shared."""
    monkeypatch.undo()  # poisoning is a launch of its own, and would be captured, too
    E, k, H, I = 16, 2, 256, 192
    _, gate_up, down = (t.bfloat16() for t in layer(1, E, H, I))
    captured = []
    for T in (4, 60):
        x, logits = torch.zeros(T, H, device="cuda", dtype=torch.bfloat16), torch.zeros(T, E, device="cuda")
        valid = torch.full((1,), T, dtype=torch.int32, device="cuda")
        expert_paths.run(path, x, logits, gate_up, down, k, num_valid=valid)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, ids, weights = expert_paths.run(path, x, logits, gate_up, down, k, num_valid=valid)
        captured.append((graph, T, x, logits, valid, out, ids, weights))
    for seed, (graph, T, x, logits, valid, out, ids, weights) in enumerate([*captured, captured[0]]):
        x.copy_(normal(T, H, seed=seed))
        logits.copy_(normal(T, E, seed=seed + 10))
        valid.fill_(T - 1)
        graph.replay()
        torch.cuda.synchronize()
        wanted = loop_moe(x, ids, weights, gate_up, down)
        assert ids[-1].tolist() == [-1, -1]
        assert torch.equal(ids[:-1].long(), logits[:-1].topk(k).indices)
        error = (out.double() - wanted).norm() / wanted.norm()
        assert error < 0.02
