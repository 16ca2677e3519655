"""Load balancing: losses against closed forms and float64 loops, the bias rule, MaxVio."""

import pytest
import torch

from tinymoe.core.model_config import ConfigError, MoEConfig
from tinymoe.experts.balance import (
    BalanceConfig,
    BalanceSink,
    auxiliary_loss,
    expert_counts,
    max_violation,
    update_selection_bias,
    z_loss,
)
from tinymoe.experts.router import Router


def router_batch(seed=0, tokens=50, experts=6, k=2):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) * 2
    return logits, logits.topk(k, dim=-1).indices


def test_counts_are_the_histogram():
    _, ids = router_batch()
    assert expert_counts(ids, 6).tolist() == [int((ids == e).sum()) for e in range(6)]
    assert expert_counts(torch.empty(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_auxiliary_loss_is_the_double_sum():
    logits, ids = router_batch()
    tokens, experts = logits.shape
    want = 0.0
    for e in range(experts):
        share = sum(int(i == e) for row in ids.tolist() for i in row) / ids.numel()
        probability = 0.0
        for row in logits.double().tolist():
            exps = [torch.tensor(x).double().exp().item() for x in row]
            probability += exps[e] / sum(exps) / tokens
        want += experts * share * probability
    assert auxiliary_loss(logits, expert_counts(ids, experts)).item() == pytest.approx(want, rel=1e-5)


def test_auxiliary_loss_closed_forms():
    even = torch.zeros(8, 4)
    assert auxiliary_loss(even, torch.tensor([4, 4, 4, 4])).item() == pytest.approx(1.0)
    collapsed = torch.tensor([[50.0, 0, 0, 0]]).repeat(8, 1)
    assert auxiliary_loss(collapsed, torch.tensor([8, 0, 0, 0])).item() == pytest.approx(4.0)


def test_auxiliary_gradient_lowers_the_busy_expert():
    logits = torch.zeros(8, 4, requires_grad=True)
    auxiliary_loss(logits, torch.tensor([10, 2, 2, 2])).backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 1:] < 0).all()


def test_z_loss_is_the_mean_squared_logsumexp():
    logits, _ = router_batch()
    want = sum(torch.logsumexp(row.double(), 0).item() ** 2 for row in logits) / len(logits)
    assert z_loss(logits).item() == pytest.approx(want, rel=1e-5)


def test_bias_moves_by_the_sign_only():
    bias = torch.zeros(2, 3)
    update_selection_bias(bias, torch.tensor([[9, 3, 0], [4, 4, 4]]), 0.5)
    assert bias.tolist() == [[-0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]


def test_bias_chooses_and_never_weights():
    config = MoEConfig(num_experts=5, top_k=2, intermediate_size=8, selection_bias=True)
    router = Router(config, 16)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(20, 16)
    assert router.selection_bias is not None
    router.selection_bias.data[3] = 10.0  # everybody now visits expert 3
    logits, ids, weights = router(x)
    assert (ids == 3).any(1).all()
    probability = logits.double().softmax(-1).gather(1, ids)
    torch.testing.assert_close(
        weights.double(), probability / probability.sum(1, keepdim=True), atol=1e-6, rtol=1e-5
    )


def test_max_violation():
    counts = torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0], [10, 5, 5, 0]])
    assert max_violation(counts).tolist() == pytest.approx([0.0, 3.0, 1.0])


def test_sink_sums_weighted_losses_by_mode():
    logits, ids = router_batch()
    weights = torch.ones(ids.shape) / 2
    aux, z = auxiliary_loss(logits, expert_counts(ids, 6)), z_loss(logits)
    for mode, want in {
        "none": 0.0,
        "aux": 0.02 * aux,
        "aux-z": 0.02 * aux + 0.01 * z,
        "bias": 0.02 * aux,
    }.items():
        sink = BalanceSink(BalanceConfig(mode=mode, aux_weight=0.02, z_weight=0.01))  # type: ignore[arg-type]
        sink.route(0, logits, ids, weights)
        sink.route(1, logits, ids, weights)
        assert sink.loss(logits).item() == pytest.approx(2 * float(want), rel=1e-6)
        assert [c.sum().item() for c in sink.counts] == [ids.numel()] * 2


def test_bias_fades_to_zero_before_the_end():
    config = BalanceConfig(bias_fade=(0.5, 0.75))
    assert [config.bias_scale(p) for p in (0, 0.5, 0.625, 0.75, 1.0)] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_errors_say_what_to_change():
    with pytest.raises(ConfigError, match=r"balance must be one of .*'aux-z'.* got 'loud'"):
        BalanceConfig(mode="loud")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bias_fade must be two fractions"):
        BalanceConfig(bias_fade=(0.8, 0.5))
