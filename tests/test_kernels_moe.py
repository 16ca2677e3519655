"""The MoE kernels against loops in float64: interpreted on a CPU (TRITON_INTERPRET=1, float32, tiny), or on a GPU.

Every buffer a kernel may write is poisoned before; what nobody should write must stay poisoned.
"""

import os

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton exists for Linux only")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (make kernels)", allow_module_level=True)

from tinymoe.kernels import combine, fused_moe, grouped_gemm, sort_tokens, topk_softmax
from tinymoe.kernels.fused_moe import DecodeTile, Plan
from tinymoe.kernels.grouped_gemm import Tile
from tinymoe.ops import reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NAN, INF = float("nan"), float("inf")
DECODE = Plan(0, DecodeTile(4, 16, 4, 2), DecodeTile(4, 16, 4, 2))
SOME = Plan(16, Tile(16, 16, 4, 2, swap=True), Tile(16, 32, 4, 2, swap=True))
MANY = Plan(16, Tile(16, 16, 4, 2, group=2), Tile(32, 16, 4, 2, group=3))
TMA = Plan(16, Tile(16, 16, 4, 2, group=2, tma=True), Tile(32, 16, 4, 2, group=3, tma=True))
PLANS = {"decode": DECODE, "some": SOME, "many": MANY}
if ON_GPU:  # the smallest that tensor cores take
    SOME = Plan(16, Tile(64, 64, 4, 3, swap=True), Tile(64, 64, 4, 3, swap=True))
    MANY = Plan(64, Tile(32, 32, 4, 2, group=2), Tile(64, 32, 4, 2, group=3))
    PLANS = {"decode": DECODE, "some": SOME, "many": MANY}


def normal(*shape, seed=0, scale=1.0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DEVICE)


# Routing

ROWS = [
    lambda E: torch.zeros(E),
    lambda E: torch.full((E,), NAN),
    lambda E: torch.full((E,), -INF),
    lambda E: torch.full((E,), INF),
    lambda E: torch.full((E,), -100.0),
    lambda E: torch.full((E,), -1e8),
    lambda E: torch.where(torch.arange(E) == E // 2, NAN, torch.linspace(-1, 1, E)),
    lambda E: torch.where(torch.arange(E) == E - 1, INF, torch.linspace(1, -1, E)),
    lambda E: torch.where(torch.arange(E) % 2 == 0, -0.0, 0.0),
    lambda E: torch.randn(E, generator=torch.Generator().manual_seed(E)),
]


def stable_top_k(scores, k):
    scores = torch.nan_to_num(scores.float(), nan=-3.4028235e38, posinf=3.4028235e38, neginf=-3.4028235e38)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


@pytest.mark.parametrize(
    "E", [1, 3, 5, 8, 60] if not ON_GPU else [1, 3, 5, 8, 60, 64, 96, 128, 160, 257, 512]
)
def test_ids_are_those_of_a_stable_sort_bit_for_bit(E):
    logits = torch.stack([row(E) for row in ROWS]).to(DEVICE)
    for k in sorted({1, min(2, E), min(8, E)} | ({E} if E <= 8 else set())):
        ids, weights = topk_softmax.topk_softmax(logits, k)
        assert torch.equal(ids.long(), stable_top_k(logits, k))
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert torch.allclose(weights.sum(1), torch.ones_like(weights[:, 0]), atol=1e-6)
        for row in ids.tolist():
            assert len(set(row)) == k
            assert set(row) <= set(range(E))
    equal = topk_softmax.topk_softmax(logits, min(2, E))[1][[0, 4, 5]]
    assert torch.allclose(equal, torch.full_like(equal, 1 / min(2, E)))


@pytest.mark.parametrize(
    "options",
    [
        {"renormalize": False},
        {"scoring": "sigmoid"},
        {"scoring": "sigmoid", "scale": 2.5, "bias": True},
        {"bias": True},
        {"scoring": "sigmoid", "bias": True, "n_group": 4, "topk_group": 2},
        {"n_group": 2, "topk_group": 1},
        {"scoring": "sigmoid", "renormalize": False, "n_group": 4, "topk_group": 3},
        {"n_group": 8, "topk_group": 4},
    ],
    ids=str,
)
def test_every_router_option_is_the_reference(options):
    options = dict(options)
    logits = torch.cat([normal(5, 8), torch.stack([row(8).to(DEVICE) for row in ROWS])])
    bias = normal(8, seed=3) if options.pop("bias", False) else None
    ids, weights = topk_softmax.topk_softmax(logits, 2, selection_bias_E=bias, **options)
    wanted_ids, wanted = reference.topk_softmax(logits, 2, selection_bias_E=bias, **options)
    assert torch.equal(ids.long(), wanted_ids)
    assert torch.allclose(weights, wanted, atol=1e-6)


@pytest.mark.parametrize("valid", [0, 1, 4, 5])
def test_padded_rows_choose_nobody(valid):
    logits = normal(5, 6)
    wanted_ids, wanted = topk_softmax.topk_softmax(logits, 2)
    logits[valid:] = NAN
    count = torch.tensor([valid], dtype=torch.int32, device=DEVICE)
    for ids, weights in (
        topk_softmax.topk_softmax(logits, 2, num_valid=count),
        reference.topk_softmax(logits, 2, num_valid=count),
    ):
        assert torch.equal(ids[:valid].long(), wanted_ids[:valid].long())
        assert torch.allclose(weights[:valid], wanted[:valid], atol=1e-6)
        assert (ids[valid:] == -1).all()
        assert (weights[valid:] == 0).all()
    with pytest.raises(ValueError, match=r"num_valid must be one int32 on the device, got torch.int64 \[1\]"):
        topk_softmax.topk_softmax(logits, 2, num_valid=count.long())


def test_no_token_and_strange_numbers():
    ids, weights = topk_softmax.topk_softmax(normal(0, 5), 2)
    assert ids.shape == weights.shape == (0, 2)
    with pytest.raises(ValueError, match=r"top_k must lie in 1\.\.5 \(the number of experts\), got 6"):
        topk_softmax.topk_softmax(normal(1, 5), 6)
    with pytest.raises(ValueError, match="5 experts cannot form 2 groups"):
        topk_softmax.topk_softmax(normal(1, 5), 1, n_group=2)


# Sorting


def loop_sort(ids, E, block):
    flat = ids.reshape(-1).tolist()
    order = [p for e in range(E) for p, expert in enumerate(flat) if expert == e]
    sizes = [flat.count(e) for e in range(E)]
    offsets = [sum(sizes[:e]) for e in range(E + 1)]
    tiles = [(e, r) for e in range(E) for r in range(offsets[e], offsets[e + 1], block)]
    return order, offsets, tiles


@pytest.mark.parametrize("E", [1, 3, 5, 60] if not ON_GPU else [1, 3, 5, 60, 64, 96, 160, 257])
@pytest.mark.parametrize("block", [1, 16])
def test_sort_is_stable_and_tiles_hold_one_expert(E, block):
    generator = torch.Generator().manual_seed(E)
    sizes = ((1, 1), (0, 2), (9, 2), (130, 1)) if ON_GPU else ((1, 1), (0, 2), (9, 2), (33, 1))
    cases = [torch.randint(-1, E, size, generator=generator) for size in sizes]
    cases += [torch.full((19, 1), E - 1), torch.full((3, 2), -1), torch.tensor([[0], [E], [E + 200]])]
    for ids in cases:
        s = sort_tokens.sort_tokens(ids.int().to(DEVICE), E, block)
        order, offsets, tiles = loop_sort(ids, E, block)
        count = int(s.num_tiles)
        assert s.order[: len(order)].tolist() == order
        assert s.offsets.tolist() == offsets
        assert [t.tolist() for t in reference.sort_tokens(ids, E)] == [order, offsets]
        assert list(zip(s.tile_expert[:count].tolist(), s.tile_row[:count].tolist())) == tiles
        assert count <= sort_tokens.max_tiles(ids.numel(), E, block) == s.tile_row.shape[0]


def test_counting_in_a_launch_of_its_own(monkeypatch):
    """What many pairs take, tried with few."""
    monkeypatch.setattr(sort_tokens, "CHUNK", 16)
    for E, pairs in ((5, 100), (1, 17), (3, 33)):
        ids = torch.randint(-1, E, (pairs, 1), generator=torch.Generator().manual_seed(0))
        s = sort_tokens.sort_tokens(ids.int().to(DEVICE), E, 16)
        order, offsets, tiles = loop_sort(ids, E, 16)
        assert s.order[: len(order)].tolist() == order
        assert s.offsets.tolist() == offsets
        assert s.tile_expert[: len(tiles)].tolist() == [e for e, _ in tiles]


@pytest.mark.skipif(not ON_GPU, reason="interpreted, this would take minutes")
@pytest.mark.parametrize(("tokens", "E", "k"), [(4096, 128, 8), (65_537, 60, 4), (700, 257, 2)])
def test_many_pairs_are_sorted_on_a_gpu(tokens, E, k):
    ids = torch.randint(-1, E, (tokens, k), dtype=torch.int32, device="cuda")
    ids[: tokens // 3] = E // 2
    s = sort_tokens.sort_tokens(ids, E, 64)
    order, offsets = reference.sort_tokens(ids, E)
    assert torch.equal(s.order[: len(order)].long(), order)
    assert torch.equal(s.offsets.long(), offsets)


# The layer


def loop_moe(x, ids, weights, gate_up, down, residual=None, shared=None):
    """Token by token, expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    width = down.shape[2]
    for t, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            if 0 <= e < down.shape[0]:
                a = gate_up[e].double() @ x[t].double()
                a = F.silu(a[:width]) * a[width:]
                out[t] += weights[t, j].double() * (down[e].double() @ a)
    for more in (residual, shared):
        out += 0 if more is None else more.double()
    return out


SHAPES = [  # T, E, k, H, I
    (1, 1, 1, 16, 16),
    (0, 3, 2, 16, 16),
    (3, 3, 2, 24, 20),
    (6, 8, 8, 33, 17),
    (16, 5, 1, 64, 40),
    (7, 5, 2, 64, 32),
]
if ON_GPU:
    SHAPES += [(33, 60, 4, 257, 100), (64, 128, 8, 256, 96), (5, 257, 8, 128, 64), (2, 64, 64, 64, 32)]


def layer(T, E, H, I, dtype=torch.float32):
    x, logits = normal(T, H, seed=1), normal(T, E, seed=2)
    gate_up, down = normal(E, 2 * I, H, seed=3, scale=H**-0.5), normal(E, H, I, seed=4, scale=I**-0.5)
    return [t.to(dtype) for t in (x, logits, gate_up, down)]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_layer_is_a_loop_over_tokens_and_experts(name, shape):
    T, E, k, H, I = shape
    if name == "decode" and not ON_GPU and T * k > 14:
        pytest.skip("interpreted, this would take half a minute")
    x, logits, gate_up, down = layer(T, E, H, I)
    if T == 16:
        logits[:, 2] = 50  # one expert takes all, the others none
    residual = normal(T, H, seed=5) if T % 2 else None
    shared = normal(T, H, seed=6) if T > 5 else None
    out, ids, weights = fused_moe.fused_moe(
        x, logits, gate_up, down, k, residual_TH=residual, shared_TH=shared, use=PLANS[name]
    )
    assert torch.equal(ids.long(), stable_top_k(logits, k))
    assert torch.allclose(weights, logits.gather(1, ids.long()).softmax(-1), atol=1e-6)
    wanted = loop_moe(x, ids, weights, gate_up, down, residual, shared)
    assert torch.allclose(out.double(), wanted, atol=2e-5)
    again, *_ = reference.fused_moe(x, logits, gate_up, down, k, residual_TH=residual, shared_TH=shared)
    assert torch.allclose(again.double(), wanted, atol=2e-5)


@pytest.mark.parametrize(
    "shape", [(7, 5, 2, 64, 32), (1, 1, 1, 16, 16), (0, 3, 2, 16, 16), (16, 5, 1, 64, 48)]
)
def test_tensor_descriptors_bring_the_same(shape):
    T, E, k, H, I = shape
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, logits, gate_up, down = layer(T, E, H, I, dtype)
    logits[:, E // 2] += 3
    plans = [TMA]
    if ON_GPU:
        tile = Tile(128, 64, 4, 3, group=4, tma=True)
        plans = [
            Plan(128, tile, tile),
            Plan(64, tile, tile._replace(num_warps=8)),
            Plan(128, tile, tile._replace(block_n=256)),
        ]
    for plan in plans:
        out, ids, weights = fused_moe.fused_moe(x, logits, gate_up, down, k, use=plan)
        wanted = loop_moe(x, ids, weights, gate_up, down)
        assert torch.allclose(out.double(), wanted, atol=2e-5 if dtype is torch.float32 else 0.05)


@pytest.mark.parametrize("name", ["some", "many"])
def test_pairs_of_nobody_cost_nothing_and_spoil_nothing(name):
    """Padded rows of a CUDA graph carry id -1 and NaN; experts without tokens hold NaN; buffers are poisoned."""
    x, _, gate_up, down = layer(6, 5, 32, 24)
    ids = torch.tensor(
        [[0, 3], [-1, -1], [3, 0], [0, -1], [5, 3], [-1, -1]], dtype=torch.int32, device=DEVICE
    )
    weights = normal(6, 2, seed=7)
    wanted = loop_moe(x, ids, weights, gate_up, down)
    x[1], x[5], weights[1], weights[5] = NAN, NAN, NAN, NAN
    gate_up[[1, 2, 4]], down[[1, 2, 4]] = NAN, NAN
    h, out = torch.full((12, 24), NAN, device=DEVICE), torch.full((6, 32), NAN, device=DEVICE)
    fused_moe.grouped(x, ids, weights, gate_up, down, h, out, None, None, PLANS[name])
    assert torch.allclose(out.double(), wanted, atol=2e-5)
    assert h[7:].isnan().all()  # five pairs are served


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("valid", [0, 1, 3, 5])
@pytest.mark.parametrize("name", [*PLANS, "tma"])
def test_padded_rows_touch_no_expert(name, valid, more):
    """Padding holds NaN, and so do the experts that no valid row visits."""
    T, E, k, H, I = 5, 4, 2, 24, 20
    dtype = torch.bfloat16 if name == "tma" and ON_GPU else torch.float32
    x, logits, gate_up, down = layer(T, E, 32 if name == "tma" else H, 32 if name == "tma" else I, dtype)
    H = x.shape[1]
    residual, shared = (
        (normal(T, H, seed=5).to(dtype), normal(T, H, seed=6).to(dtype)) if more else (None, None)
    )
    wanted_ids = stable_top_k(logits, k)
    wanted_ids[valid:] = -1
    weights = torch.where(wanted_ids >= 0, logits.float().gather(1, wanted_ids.clamp(min=0)).softmax(-1), 0)
    wanted = loop_moe(x, wanted_ids, weights, gate_up, down, residual, shared)
    unused = [e for e in range(E) if e not in wanted_ids]
    gate_up[unused], down[unused], x[valid:], logits[valid:] = NAN, NAN, NAN, NAN
    count = torch.tensor([valid], dtype=torch.int32, device=DEVICE)
    options = {"residual_TH": residual, "shared_TH": shared, "num_valid": count}
    plan = TMA if name == "tma" else PLANS[name]
    if name == "tma" and ON_GPU:
        tile = Tile(128, 64, 4, 3, group=4, tma=True)
        plan = Plan(128, tile, tile)
    out, ids, got = fused_moe.fused_moe(x, logits, gate_up, down, k, use=plan, **options)
    again = reference.fused_moe(x, logits, gate_up, down, k, **options)
    for o, i, w in ((out, ids, got), again):
        assert torch.equal(i.long(), wanted_ids)
        assert torch.allclose(w, weights, atol=1e-6)
        assert torch.allclose(o.double(), wanted, atol=2e-5 if dtype is torch.float32 else 0.05)


@pytest.mark.parametrize("name", PLANS)
def test_a_token_with_nan_leaves_the_others_alone(name):
    x, logits, gate_up, down = layer(3, 4, 32, 16)
    wanted = fused_moe.fused_moe(x, logits, gate_up, down, 2, use=PLANS[name])[0]
    x[1], logits[1] = NAN, NAN
    out = fused_moe.fused_moe(x, logits, gate_up, down, 2, use=PLANS[name])[0]
    assert torch.equal(out[[0, 2]], wanted[[0, 2]])
    assert out[1].isnan().all()


@pytest.mark.parametrize("name", ["some", "many"])
def test_a_row_is_the_same_bits_in_any_batch(name):
    plan = PLANS[name]
    x, logits, gate_up, down = layer(16, 3, 48, 24)
    alone = [
        fused_moe.fused_moe(x[t : t + 1], logits[t : t + 1], gate_up, down, 2, use=plan)[0] for t in (0, 9)
    ]
    whole = fused_moe.fused_moe(x, logits, gate_up, down, 2, use=plan)[0][[0, 9]]
    if ON_GPU:
        assert torch.equal(torch.cat(alone), whole)
    else:  # the interpreter multiplies with numpy, whose last bit depends on a row's place
        assert torch.allclose(torch.cat(alone), whole, atol=1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_weights_beyond_two_gigabytes(name):
    """The last expert lies 2^31 elements away: 32-bit offsets would wrap. The memory between is never touched."""
    if ON_GPU and torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB")
    E, H, I = 2, 16, 16
    far = 2**31 + 64
    x, logits, gate_up, down = layer(2, E, H, I)
    logits[:, 1] = 9
    spread = []
    for t in (gate_up, down):
        room = torch.empty(far + t[0].numel(), dtype=t.dtype, device=DEVICE)
        view = room.as_strided(t.shape, (far, t.shape[2], 1))
        view.copy_(t)
        spread.append(view)
    out = fused_moe.fused_moe(x, logits, *spread, 2, use=PLANS[name])[0]
    assert torch.equal(out, fused_moe.fused_moe(x, logits, gate_up, down, 2, use=PLANS[name])[0])


def test_up_writes_served_rows_only():
    x, _, gate_up, _ = layer(2, 3, 16, 16)
    s = sort_tokens.sort_tokens(torch.tensor([[1], [-1]], dtype=torch.int32, device=DEVICE), 3, SOME.block_m)
    h = torch.full((2, 16), NAN, device=DEVICE)
    grouped_gemm.up(x, gate_up, s, h, 1, SOME.up)
    assert not h[0].isnan().any()
    assert h[1].isnan().all()


def test_combine_adds_in_slot_order_in_float32():
    y = torch.tensor([[256.0], [1.0], [1.0], [-256.0]], dtype=torch.bfloat16, device=DEVICE)
    ids = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32, device=DEVICE)
    out = torch.full((1, 1), NAN, dtype=torch.bfloat16, device=DEVICE)
    combine.combine(y, ids, 4, out)
    assert out.item() == 2.0  # in bfloat16, 256 + 1 would be 256


def test_shapes_types_and_layouts_are_checked():
    x, logits, gate_up, down = layer(2, 3, 16, 16)
    with pytest.raises(
        ValueError, match=r"down has shape \[3, 16, 8\], but gate_up \[3, 32, 16\] asks for \[3, 16, 16\]"
    ):
        fused_moe.fused_moe(x, logits, gate_up, down[:, :, :8], 2)
    with pytest.raises(
        ValueError, match=r"down is torch.float16 and x is torch.float32: convert one of them"
    ):
        fused_moe.fused_moe(x, logits, gate_up, down.half(), 2)
    with pytest.raises(ValueError, match=r"gate_up must be contiguous, got strides \[512, 1, 32\]"):
        fused_moe.fused_moe(x, logits, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down, 2)


@pytest.mark.skipif(not ON_GPU, reason="tiles of the real size")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(16, 2, 192, 192), (64, 6, 512, 704), (8, 2, 512, 1024), (60, 4, 257, 100)]
)
def test_planned_tiles_for_every_bucket(shape, dtype):
    E, k, H, I = shape
    for T in (1, 2, 4, 9, 33, 130, 700, 5000):
        x, logits, gate_up, down = layer(T, E, H, I, dtype)
        out, _ids, _weights = fused_moe.fused_moe(x, logits, gate_up, down, k)
        rows = slice(max(0, T - 40), T)
        wanted = reference.fused_moe(x[rows].float(), logits[rows].float(), gate_up.float(), down.float(), k)[
            0
        ]
        error = (out[rows].float() - wanted).norm() / wanted.norm()
        assert error < (2e-5 if dtype is torch.float32 else 0.02), (T, error)
        if T > 1:
            same, *_ = fused_moe.fused_moe(x, logits, gate_up, down, k, invariant=True)
            alone, *_ = fused_moe.fused_moe(x[:1], logits[:1], gate_up, down, k, invariant=True)
            assert torch.equal(same[:1], alone)


def test_the_file_checks_itself(capsys, monkeypatch):
    fused_moe.main()
    assert capsys.readouterr().out.count("relative error") == (5 if ON_GPU else 3)
    monkeypatch.setattr(fused_moe, "combine", lambda y, ids, E, out, *more: out.zero_())
    with pytest.raises(SystemExit, match="the kernels are wrong"):
        fused_moe.main()


@pytest.mark.parametrize("invariant", [False, True])
def test_every_number_of_tokens_has_a_plan_and_they_are_few(invariant):
    plans = {fused_moe.plan(T, 128, 8, 2048, 768, invariant) for T in range(1, 3000)}
    assert len(plans) <= (1 if invariant else 6)
    for M in (1, 2, 3, 4, 5, 8, 9, 1000):  # a bucket shares one plan
        bucket = 1 << (M - 1).bit_length()
        assert fused_moe.plan(M, 128, 8, 2048, 768) == fused_moe.plan(bucket, 128, 8, 2048, 768)
