"""What the kernels' launchers refuse, each call one change away from one that runs: interpreted on a CPU
(TRITON_INTERPRET=1), or on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (make kernels)", allow_module_level=True)

from tinymoe.kernels import expert_paths
from tinymoe.kernels.blocked_sparse import blocked_sparse
from tinymoe.kernels.combine import combine
from tinymoe.kernels.dense_masked import dense_masked
from tinymoe.kernels.fused_moe import DecodeTile, Plan, fused_moe
from tinymoe.kernels.grouped_gemm import Tile, down, up
from tinymoe.kernels.linear import FEW, linear, linear_few
from tinymoe.kernels.paged_attention import paged_attention
from tinymoe.kernels.rms_norm import add_rms_norm, rms_norm
from tinymoe.kernels.rope import rope
from tinymoe.kernels.sample import sample
from tinymoe.kernels.sort_tokens import sort_tokens
from tinymoe.kernels.store_kv import store_kv
from tinymoe.kernels.topk_softmax import topk_softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, E, K, H, I = 3, 4, 2, 16, 16


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def ints(*shape):
    return zeros(*shape, dtype=torch.int32)


def gapped(t):
    """The same numbers, each followed by a gap."""
    return torch.stack((t, t), -1)[..., 0]


def turned(t):
    """The same numbers, the last two dimensions exchanged in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def layer():
    return {"x_TH": zeros(T, H), "gate_up_E2IH": zeros(E, 2 * I, H), "down_EHI": zeros(E, H, I)}


def routes():
    return {"ids_TK": ints(T, K), "weights_TK": zeros(T, K)}


def caches():
    return {"k_cache": zeros(2, 4, 1, 32), "v_cache": zeros(2, 4, 1, 32)}


def sorted_pairs():
    return sort_tokens(ints(T, K), E, 16)


TILE = Tile(16, 16, 4, 1)
PATHS = {f"run {path}": path for path in ("few", "grouped64", "dense64", "blocked64")}
FEW_PLAN = Plan(0, DecodeTile(16, 16, 4, 1), DecodeTile(16, 16, 4, 1))
MANY_PLAN = Plan(16, TILE, TILE)
ROPE = {"heads": (2, 1, 32), "cos_TR": zeros(T, 16), "sin_TR": zeros(T, 16)}
ATTENTION = {"max_query_len": 1, "max_context": 4}

# The launcher, and arguments that it takes.
CALLS = {
    "dense": (dense_masked, lambda: {**layer(), **routes(), "tiles": (16, TILE, TILE)}),
    "blocked": (blocked_sparse, lambda: {**layer(), **routes(), "tiles": (16, TILE, TILE)}),
    "fused, few": (fused_moe, lambda: {**layer(), "logits_TE": zeros(T, E), "top_k": K, "use": FEW_PLAN}),
    "fused, many": (fused_moe, lambda: {**layer(), "logits_TE": zeros(T, E), "top_k": K, "use": MANY_PLAN}),
    "linear": (linear, lambda: {"x_TK": zeros(2, 8), "weight_NK": zeros(3, 8), "bias_N": zeros(3)}),
    "linear_few": (
        linear_few,
        lambda: {"x_TK": zeros(2, 8), "weight_NK": zeros(3, 8), "out_dtype": torch.float32},
    ),
    "topk": (topk_softmax, lambda: {"logits_TE": zeros(T, E), "top_k": K}),
    "rope": (
        lambda k_cache=None, v_cache=None, slots=None, **more: rope(
            **more, cache=None if slots is None else (k_cache, v_cache, slots)
        ),
        lambda: {**ROPE, **caches(), "qkv": zeros(T, 4 * 32), "slots": ints(T)},
    ),
    "store_kv": (
        store_kv,
        lambda: {**caches(), "k_TGH": zeros(T, 1, 32), "v_TGH": zeros(T, 1, 32), "slots_T": ints(T)},
    ),
    "sample": (
        sample,
        lambda: {
            "logits_RV": zeros(T, 8), "temperature_R": zeros(T), "seeds_R": ints(T).long(), "positions_R": ints(T),
        },
    ),
    "rms_norm": (rms_norm, lambda: {"x": zeros(T, H), "weight": zeros(H), "eps": 1e-6}),
    "add_rms_norm": (
        add_rms_norm,
        lambda: {"x": zeros(T, H), "residual": zeros(T, H), "weight": zeros(H), "eps": 1e-6},
    ),
    "combine": (
        combine,
        lambda: {"y_PH": zeros(T * K, H), "ids_TK": ints(T, K), "num_experts": E, "out_TH": zeros(T, H)},
    ),
    "sort": (sort_tokens, lambda: {"ids_TK": ints(T, K), "num_experts": E, "block_m": 16}),
    "up": (
        up,
        lambda: {
            "x_TH": zeros(T, H), "gate_up_E2IH": zeros(E, 2 * I, H), "s": sorted_pairs(), "h_PI": zeros(T * K, I),
            "top_k": K, "tile": TILE,
        },
    ),
    "down": (
        down,
        lambda: {
            "h_PI": zeros(T * K, I), "down_EHI": zeros(E, H, I), "weights_TK": zeros(T, K), "s": sorted_pairs(),
            "y_PH": zeros(T * K, H), "tile": TILE,
        },
    ),
    "attention": (
        paged_attention,
        lambda: {
            **caches(), **ATTENTION, "q_TNH": zeros(1, 2, 32), "block_tables_SB": ints(1, 2),
            "query_start": torch.arange(2, dtype=torch.int32, device=DEVICE), "context_lens_S": ints(1) + 3,
        },
    ),
}  # fmt: skip
CALLS |= {
    name: (
        expert_paths.run,
        lambda path=path: {"path": path, **layer(), "logits_TE": zeros(T, E), "top_k": K},
    )
    for name, path in PATHS.items()
}

KNOWN = ("dense", "blocked")
FUSED = ("fused, few", "fused, many")
LAYERS = (*KNOWN, *FUSED, *PATHS)
ROUTING = (*FUSED, *PATHS, "topk")
BAD_LAYER = [
    ("x_TH", lambda: turned(zeros(T, H))),
    ("x_TH", lambda: zeros(T, H + 1)),
    ("x_TH", lambda: zeros(H)),
    ("x_TH", lambda: zeros(T, H).half()),
    ("x_TH", lambda: zeros(T, H).double()),
    ("gate_up_E2IH", lambda: turned(zeros(E, 2 * I, H))),
    ("gate_up_E2IH", lambda: gapped(zeros(E, 2 * I, H))),
    ("gate_up_E2IH", lambda: zeros(E, 2 * I + 1, H)),
    ("gate_up_E2IH", lambda: zeros(E, 4 * I, H)),
    ("gate_up_E2IH", lambda: zeros(E, 2 * I, H).bfloat16()),
    ("down_EHI", lambda: turned(zeros(E, H, I))),
    ("down_EHI", lambda: zeros(E, H, I // 2)),
    ("down_EHI", lambda: zeros(E + 1, H, I)),
    ("down_EHI", lambda: zeros(E, H, I).bfloat16()),
]
BAD_LAYER += [
    (name, bad)
    for name in ("residual_TH", "shared_TH")
    for bad in (
        lambda: zeros(T - 1, H),
        lambda: zeros(1, H),
        lambda: zeros(T, H - 1),
        lambda: turned(zeros(T, H)),
        lambda: zeros(T, H).half(),
        lambda: 1.0,
    )
]
BAD_ROUTES = [
    ("ids_TK", lambda: turned(ints(T, K))),
    ("ids_TK", lambda: ints(T, 2 * K)[:, :K]),
    ("ids_TK", lambda: ints(T + 1, K)),
    ("ids_TK", lambda: ints(T, K + 1)),
    ("ids_TK", lambda: ints(T * K)),
    ("ids_TK", lambda: ints(T, K).long()),
    ("ids_TK", lambda: ints(T, 0)),
    ("weights_TK", lambda: turned(zeros(T, K))),
    ("weights_TK", lambda: zeros(T, 1)),
    ("weights_TK", lambda: zeros(T, K).bfloat16()),
]
BAD_ROUTING = [
    ("logits_TE", lambda: turned(zeros(T, E))),
    ("logits_TE", lambda: gapped(zeros(T, E))),
    ("logits_TE", lambda: zeros(T, E).double()),
    ("logits_TE", lambda: ints(T, E)),
    ("selection_bias_E", lambda: zeros(E - 1)),
    ("selection_bias_E", lambda: zeros(1, E)),
    ("selection_bias_E", lambda: gapped(zeros(E))),
    ("selection_bias_E", lambda: ints(E)),
    ("num_valid", lambda: 2),
    ("num_valid", lambda: ints(2)),
    ("num_valid", lambda: ints(1).long()),
    ("top_k", lambda: 0),
    ("top_k", lambda: -1),
    ("top_k", lambda: E + 1),
    ("top_k", lambda: 2.0),
    ("n_group", lambda: 0),
    ("n_group", lambda: -2),
    ("n_group", lambda: 3),
    ("topk_group", lambda: 2),
]
BAD_PRODUCT = [
    ("x_TK", lambda: turned(zeros(2, 8))),
    ("x_TK", lambda: zeros(2, 7)),
    ("x_TK", lambda: zeros(2, 9)),
    ("x_TK", lambda: zeros(2, 8).half()),
    ("x_TK", lambda: ints(2, 8)),
    ("weight_NK", lambda: turned(zeros(3, 8))),
    ("weight_NK", lambda: zeros(3, 8).double()),
    ("out_dtype", lambda: torch.float64),
]
BAD_SLOTS = [
    lambda: ints(T - 1),
    lambda: ints(T, 1),
    lambda: gapped(ints(T)),
    lambda: zeros(T),
    lambda: ints(T).short(),
]
BAD_CACHES = [
    (name, bad)
    for name in ("k_cache", "v_cache")
    for bad in (
        lambda: zeros(3, 4, 1, 32),
        lambda: zeros(2, 4, 2, 32),
        lambda: zeros(4, 1, 32),
        lambda: gapped(zeros(2, 4, 1, 32)),
        lambda: zeros(2, 8, 1, 32)[:, :4],
        lambda: zeros(2, 4, 1, 32).bfloat16(),
    )
]
BAD_INDICES = [lambda: ints(1, 2).long(), lambda: ints(2, 2), lambda: gapped(ints(1, 2)), lambda: ints(2)]
BAD = [(call, name, bad) for call in LAYERS for name, bad in BAD_LAYER]
BAD += [(call, name, bad) for call in KNOWN for name, bad in BAD_ROUTES]
BAD += [(call, name, bad) for call in ROUTING for name, bad in BAD_ROUTING]
BAD += [(call, "logits_TE", bad) for call in (*FUSED, *PATHS) for bad in (
    lambda: zeros(T - 1, E), lambda: zeros(T + 1, E), lambda: zeros(T, E + 1), lambda: zeros(T, E - 1),
)]  # fmt: skip
BAD += [(call, name, bad) for call in ("linear", "linear_few") for name, bad in BAD_PRODUCT]
BAD += [("linear", "bias_N", bad) for bad in (
    lambda: zeros(2), lambda: zeros(1, 3), lambda: gapped(zeros(3)), lambda: ints(3), lambda: zeros(3).double(),
)]  # fmt: skip
BAD += [("linear_few", "x_TK", lambda: zeros(FEW + 1, 8))]
BAD += [(call, name, bad) for call in ("rope", "store_kv", "attention") for name, bad in BAD_CACHES]
BAD += [("rope", "slots", bad) for bad in BAD_SLOTS] + [("store_kv", "slots_T", bad) for bad in BAD_SLOTS]
BAD += [("rope", *rest) for rest in (
    ("clip", lambda: 0), ("clip", lambda: -1.0), ("clip", lambda: float("nan")), ("heads", lambda: (4, 0, 32)),
    ("qkv", lambda: turned(zeros(T, 4 * 32))), ("qkv", lambda: zeros(T, 4 * 32).double()),
    ("qkv", lambda: zeros(4 * 32)), ("cos_TR", lambda: zeros(T, 32)[:, :16]), ("sin_TR", lambda: zeros(T, 15)),
    ("cos_TR", lambda: ints(T, 16)), ("sin_TR", lambda: zeros(T - 1, 16)),
)]  # fmt: skip
BAD += [("store_kv", *rest) for rest in (
    ("k_TGH", lambda: gapped(zeros(T, 1, 32))), ("v_TGH", lambda: zeros(T, 1, 16)),
    ("v_TGH", lambda: zeros(T, 1, 32).half()),
)]  # fmt: skip
BAD += [("sample", *rest) for rest in (
    ("logits_RV", lambda: turned(zeros(T, 8))), ("logits_RV", lambda: zeros(T, 0)),
    ("logits_RV", lambda: zeros(T, 8).double()), ("logits_RV", lambda: ints(T, 8)), ("logits_RV", lambda: zeros(8)),
    ("temperature_R", lambda: zeros(T).double()), ("temperature_R", lambda: ints(T)),
    ("temperature_R", lambda: zeros(T - 1)), ("seeds_R", lambda: ints(T)), ("seeds_R", lambda: zeros(T)),
    ("seeds_R", lambda: gapped(ints(T).long())), ("positions_R", lambda: zeros(T)),
    ("positions_R", lambda: ints(T).short()), ("positions_R", lambda: ints(T, 1)), ("splits", lambda: 0),
    ("splits", lambda: 3), ("splits", lambda: -2), ("splits", lambda: 2.0),
)]  # fmt: skip
BAD += [(call, *rest) for call in ("rms_norm", "add_rms_norm") for rest in (
    ("x", lambda: zeros(())), ("x", lambda: zeros(T, 0)), ("x", lambda: ints(T, H)), ("weight", lambda: zeros(H + 1)),
    ("weight", lambda: gapped(zeros(H))), ("weight", lambda: ints(H)),
)]  # fmt: skip
BAD += [("add_rms_norm", "residual", bad) for bad in (lambda: zeros(1, H), lambda: zeros(T, H).half())]
BAD += [("combine", *rest) for rest in (
    ("y_PH", lambda: zeros(T, H)), ("y_PH", lambda: turned(zeros(T * K, H))), ("ids_TK", lambda: turned(ints(T, K))),
    ("ids_TK", lambda: zeros(T, K)), ("out_TH", lambda: turned(zeros(T, H))),
    ("residual_TH", lambda: zeros(T, H - 1)), ("shared_TH", lambda: turned(zeros(T, H))),
)]  # fmt: skip
BAD += [("sort", *rest) for rest in (
    ("ids_TK", lambda: turned(ints(T, K))), ("ids_TK", lambda: ints(T, K).long()), ("ids_TK", lambda: ints(T)),
    ("num_experts", lambda: 0), ("block_m", lambda: 0),
)]  # fmt: skip
BAD += [("up", *rest) for rest in (
    ("x_TH", lambda: zeros(T - 1, H)), ("x_TH", lambda: turned(zeros(T, H))), ("top_k", lambda: 1),
    ("gate_up_E2IH", lambda: turned(zeros(E, 2 * I, H))), ("gate_up_E2IH", lambda: zeros(E - 1, 2 * I, H)),
    ("h_PI", lambda: zeros(T, I)), ("h_PI", lambda: turned(zeros(T * K, I))),
)]  # fmt: skip
BAD += [("down", *rest) for rest in (
    ("h_PI", lambda: zeros(T * K, I + 1)), ("h_PI", lambda: turned(zeros(T * K, I))),
    ("down_EHI", lambda: zeros(E, H, I).half()), ("weights_TK", lambda: zeros(T, 1)),
    ("weights_TK", lambda: turned(zeros(T, K))), ("y_PH", lambda: zeros(T, H)),
)]  # fmt: skip
BAD += [("attention", *rest) for rest in (
    ("q_TNH", lambda: zeros(2, 32)), ("q_TNH", lambda: gapped(zeros(1, 2, 32))), ("split", lambda: 0),
    ("split", lambda: -128), ("window", lambda: 0), ("out", lambda: zeros(1, 1, 32)),
    ("out", lambda: gapped(zeros(1, 2, 32))), ("query_start", lambda: ints(1)),
    ("query_start", lambda: ints(2).long()), ("context_lens_S", lambda: ints(2)),
    ("context_lens_S", lambda: ints(1).long()), *(("block_tables_SB", bad) for bad in BAD_INDICES),
)]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_what_the_changes_start_from_runs(call):
    launch, arguments = CALLS[call]
    launch(**arguments())


@pytest.mark.parametrize(
    ("call", "name", "bad"), [pytest.param(*row, id=f"{row[0]}-{row[1]}-{i}") for i, row in enumerate(BAD)]
)
def test_refused(call, name, bad):
    launch, arguments = CALLS[call]
    with pytest.raises(
        ValueError,
        match=r"(must|has shape|cannot form|are not|out_dtype|is torch).*(got|asks for|chosen|sorted|convert)",
    ):
        launch(**arguments() | {name: bad()})


@pytest.mark.parametrize("call", FUSED)
def test_options_are_refused_without_tokens_too(call):
    launch, arguments = CALLS[call]
    none = {"x_TH": zeros(0, H), "logits_TE": zeros(0, E)}
    launch(**arguments() | none)
    with pytest.raises(ValueError, match="scoring must be 'softmax' or 'sigmoid', got 'tanh'"):
        launch(**arguments() | none, scoring="tanh")


@pytest.mark.parametrize(
    ("widths", "bad"), [((32, 32), 0), ((32, 32), 1), ((64, 32), 0), ((64, 32), 1)], ids=str
)
def test_norm_weights_with_gaps_are_refused(widths, bad):
    launch, arguments = CALLS["rope"]
    weights = [zeros(w) for w in widths]
    launch(**arguments(), q_weight=weights[0], k_weight=weights[1])
    weights[bad] = gapped(weights[bad])
    with pytest.raises(ValueError, match=rf"{'qk'[bad]}_weight must be a contiguous \[{widths[bad]}\]"):
        launch(**arguments(), q_weight=weights[0], k_weight=weights[1])


def test_few_rows_need_an_input():
    with pytest.raises(ValueError, match=r"K at least 1, got \[2, 0\]"):
        linear_few(zeros(2, 0), zeros(3, 0), torch.float32)


def test_views_that_fit_are_taken():
    """Rows and experts with gaps between them, ids of either width, a layer's part of a larger pool."""
    wide = {
        "x_TH": zeros(T, H + 3)[:, :H],
        "gate_up_E2IH": zeros(E, 3 * I, H)[:, : 2 * I],
        "down_EHI": zeros(E, H, I),
    }
    fused_moe(**wide, logits_TE=zeros(T, E + 2).bfloat16()[:, :E], top_k=K, num_valid=ints(1), use=FEW_PLAN,
              shared_TH=zeros(T, 2 * H)[:, H:], selection_bias_E=zeros(E))  # fmt: skip
    launch, arguments = CALLS["rope"]
    pool = zeros(2, 2, 4, 1, 32)
    launch(**arguments() | {"k_cache": pool[0], "v_cache": pool[1], "slots": ints(T).long(), "clip": 3})
    launch, arguments = CALLS["sample"]
    launch(
        **arguments()
        | {"positions_R": ints(T).long(), "logits_RV": zeros(T, 9).bfloat16()[:, :8], "splits": 2}
    )
