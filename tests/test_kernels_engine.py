"""The engine on its kernels, interpreted on a CPU: what it hands to them, decode steps with rows to spare included.

Judge: the plain loop of tiny_models, which uses no kernel. On a GPU test_gpu.py does the same with compiled kernels.
"""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 (make kernels)", allow_module_level=True)

from importlib import import_module

from tiny_models import _config, _moe

from tinymoe import ops
from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import LayerConfig
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.engine.forward.graphs import DecodeGraphs, Graph
from tinymoe.engine.forward.passes import DraftGraphs
from tinymoe.model.attention import CausalAttend
from tinymoe.model.decoder import Decoder
from tinymoe.model.moe import MoE
from tinymoe.ops import gpu

ROOMS = {
    "moe": "fused_moe", "routing": "topk_softmax", "norm": "rms_norm", "matmul": "linear", "counting": "count_routes",
    "rotary": "rope", "pages": "paged_attention", "sampling": "sample",
}  # fmt: skip
WIDE = {"hidden_size": 32, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS = {
    "moe": _config([_moe(num_experts=4)], qk_norm="head", **WIDE),
    "mixed": _config(
        [
            LayerConfig(intermediate_size=24),
            _moe(shared_intermediate_size=12, shared_gate=True, norm_topk_prob=False, sliding_window=4),
        ],
        qk_norm="full",
        clip_qkv=1.0,
        **WIDE,
    ),
}
PROMPTS = [[3, 17, 5, 40, 8], [9], [22, 4, 31]]
NEW = 4


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """The door to the kernels stands open on a CPU, too."""
    real = ops.plan_attention
    for name, file in ROOMS.items():
        monkeypatch.setattr(gpu, name, import_module(f"tinymoe.kernels.{file}"))
    monkeypatch.setattr(gpu, "serves", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr(
        ops,
        "plan_attention",
        lambda spans, size, window, device="cpu", invariant=False: (
            gpu.plan_pages(spans, window, device, invariant)
            if not torch.is_grad_enabled()
            else real(spans, size, window)
        ),
    )


class Interpreted(DecodeGraphs):
    """Replays by running again, over the same fixed buffers."""

    routed = True

    def capture(self, windows, max_context, invariant):
        self.further = {}
        for bucket in self.buckets:
            plans = {
                window: gpu.PagePlan(
                    self.inputs.tables[:bucket], self.starts[: bucket + 1], self.inputs.context_lens[:bucket],
                    1, 1, max_context, window, invariant,
                )
                for window in windows
            }  # fmt: skip
            out = [torch.full((bucket, 61), torch.nan), torch.full((2, bucket), torch.nan).double(), None]

            def replay(bucket=bucket, plans=plans, out=out):
                with torch.inference_mode():
                    logits, drawn, ids_LTK = self._run(bucket, plans)
                    out[0].copy_(logits)
                    out[1].copy_(drawn)
                    self.graphs[bucket] = self.graphs[bucket]._replace(ids_LTK=ids_LTK)

            routed = torch.zeros(1, bucket, 2, dtype=torch.int32) if self.routed else None
            self.graphs[bucket] = Graph(replay, out[0], out[1], routed)
            self.further[bucket] = torch.inference_mode()(partial(self._further, bucket, plans))
        self.replayed = 0

    def _further(self, bucket, plans):
        raise AssertionError("only a draft goes on by itself")

    def launch(self, rows, tables):
        self.replayed += 1
        flight = super().launch(rows, tables)
        n = len(rows.positions)
        if not self.routed:
            return flight
        graph = self.graphs[self.bucket_for(n)]
        assert (graph.ids_LTK[:, n:] == -1).all()  # rows of nobody visit nobody
        return flight._replace(ids_LTK=graph.ids_LTK[:, :n])

    def mark(self):
        return SimpleNamespace(synchronize=lambda: None)


class InterpretedPasses(Interpreted, DraftGraphs):
    """A draft's passes, likewise."""

    routed = False

    def _further(self, bucket, plans):
        DraftGraphs._further(self, bucket, plans)

    def start(self, staged, rows, tables):
        self.replayed += 1
        return super().start(staged, rows, tables)


def decoder(name):
    model = Decoder(CONFIGS[name]).init_weights(0.4, seed=3).eval()
    for module in model.modules():
        if isinstance(module, MoE):
            module.path = "fused"
    return model


def judge(model, prompt):
    """Greedy tokens of the plain loop, and the narrowest choice among them. Gradients are on: no kernel takes part."""
    ids, gap = list(prompt), float("inf")
    with torch.enable_grad():
        for _ in range(NEW):
            logits = model(torch.tensor(ids), torch.arange(len(ids)), CausalAttend(1, len(ids), model.config))
            best = logits[-1].topk(2)
            gap = min(gap, (best.values[0] - best.values[1]).item())
            ids.append(int(best.indices[0]))
    return ids[len(prompt) :], gap


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=["default", "invariant"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_the_plain_loop(name, graphs, options):
    model = decoder(name)
    wanted = [judge(model, prompt) for prompt in PROMPTS]
    assert min(gap for _, gap in wanted) > 1e-3  # no near tie: rounding decides nothing
    config = EngineConfig(max_num_seqs=4, max_model_len=16, block_size=4, num_blocks=24, **options)
    one = Engine(model, config)
    if graphs:
        one.runner.graphs = Interpreted(
            one.runner._decode, [1, 4], one.blocks.tables.shape[1], torch.device("cpu")
        )
        one.runner.graphs.capture(set(one.runner.windows), 16, model.invariant)
    for i, prompt in enumerate(PROMPTS):
        one.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=NEW))
    out = {}
    while one.has_unfinished_requests():
        out |= {o.request_id: o for o in one.step()}
    assert [out[str(i)].outputs[0].token_ids for i in range(3)] == [tokens for tokens, _ in wanted]
    assert not graphs or one.runner.graphs.replayed >= NEW - 1
    load = one.routes.load[[i for i, layer in enumerate(model.config.layers) if layer.moe]]
    assert (load.sum(axis=1) == 2 * one.metrics.computed_tokens).all()  # padded rows are counted nowhere


def test_drafts_are_verified_row_by_row():
    """The model is its own draft, so that every draft stays: rows of one sequence see one another's keys."""
    model = decoder("moe")
    wanted = [judge(model, prompt)[0] for prompt in PROMPTS]
    guess = {"method": "draft_model", "model": "itself", "num_speculative_tokens": 2, "adaptive": False}
    config = EngineConfig(
        max_num_seqs=4, max_model_len=16, block_size=4, num_blocks=24, speculative_config=guess
    )
    one = Engine(model, config, draft=model)
    drafter = one.spec.proposer.drafter
    for owner, kind, passes in ((one.runner, Interpreted, ()), (drafter, InterpretedPasses, (2,))):
        width = one.blocks.tables.shape[1]
        owner.graphs = kind(owner._decode, [1, 4, 12], width, torch.device("cpu"), *passes)
        owner.graphs.capture(set(owner.windows), 16, False)
    for i, prompt in enumerate(PROMPTS):
        one.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=NEW))
    out = {}
    while one.has_unfinished_requests():
        out |= {o.request_id: o for o in one.step()}
    assert [out[str(i)].outputs[0].token_ids for i in range(3)] == wanted
    assert one.metrics.accepted_tokens == one.metrics.draft_tokens > 0
    assert one.runner.graphs.replayed > 0
    assert drafter.graphs.replayed > 0
