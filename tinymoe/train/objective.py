"""What training minimises: next-token cross-entropy plus balance losses, or (distillation) distance to a target model."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinymoe.experts.balance import BalanceConfig, BalanceSink
from tinymoe.model.attention import CausalAttend
from tinymoe.model.decoder import Decoder


class Losses(NamedTuple):
    """total: what is minimised. main: cross-entropy or distillation loss per token, nats. acceptance: mean over
    positions of the chance that a token drawn from the student would be accepted (NaN when there is no target).
    counts: loads [L, E] int64 (E = 0 for a dense model)."""

    total: Tensor
    main: Tensor
    acceptance: Tensor
    counts: Tensor


def acceptance(target_TV: Tensor, draft_TV: Tensor) -> Tensor:
    """Σ min(p, q) per position from logits: the chance that speculative sampling keeps a draft token (Leviathan et al.
    2023, arXiv 2211.17192). [T, V] twice -> [T] float32."""
    return torch.minimum(target_TV.float().softmax(-1), draft_TV.float().softmax(-1)).sum(-1)


def distillation(
    target_TV: Tensor, draft_TV: Tensor, acceptance_share: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(1 - a) · KL(target ‖ draft) + a · (1 - acceptance), means over positions; and the acceptance.

    Both at `temperature`: the lower, the more it is the target's likeliest token that counts.

    KL pulls from far away; 1 - acceptance (total variation) is what speculative decoding pays for (Zhou et al. 2023,
    DistillSpec, arXiv 2310.08461), so `acceptance_share` a grows over the run.
    """
    log_q_TV = (draft_TV / temperature).log_softmax(-1)
    log_p_TV = (target_TV / temperature).log_softmax(-1)
    p_TV = log_p_TV.exp()
    kl = (p_TV * (log_p_TV - log_q_TV)).sum(-1).mean()
    accepted = torch.minimum(p_TV, log_q_TV.exp()).sum(-1).mean()
    return (1 - acceptance_share) * kl + acceptance_share * (1 - accepted), accepted


class Objective(nn.Module):
    """Losses of a batch of sequences tokens [S, length + 1] int64; S and length are fixed, so it can be compiled.

    With `teacher` (a Decoder with the same vocabulary) the loss is distillation and the data's own next tokens are
    not used as labels. temperature: of both, in that loss.
    """

    def __init__(
        self,
        model: Decoder,
        batch: int,
        length: int,
        balance: BalanceConfig,
        teacher: Decoder | None,
        device: torch.device,
        temperature: float = 1.0,
    ):
        super().__init__()
        self.model, self.balance, self.temperature = model, balance, temperature
        self.teacher = None if teacher is None else teacher.requires_grad_(False)
        self.attend = CausalAttend(batch, length)
        positions = torch.arange(length, device=device).repeat(batch)
        self.register_buffer("positions_T", positions, persistent=False)

    def forward(self, tokens_SL: Tensor, acceptance_share: Tensor) -> Losses:
        inputs_T, labels_T = tokens_SL[:, :-1].reshape(-1), tokens_SL[:, 1:].reshape(-1)
        sink = BalanceSink(self.balance)
        logits_TV = self.model(inputs_T, self.positions_T, self.attend, sink)
        if self.teacher is None:
            main = F.cross_entropy(logits_TV, labels_T)
            accepted = main.new_full((), float("nan"))
        else:
            with torch.no_grad():
                target_TV = self.teacher(inputs_T, self.positions_T, self.attend)
            main, accepted = distillation(target_TV, logits_TV, acceptance_share, self.temperature)
        counts = torch.stack(sink.counts) if sink.counts else labels_T.new_zeros((0, 0))
        # Adding a zero here would break compiling: the compiler drops the sum, so that total and the detached main
        # become one tensor, and that one has no gradient.
        total = main + sink.loss(main) if sink.losses else main
        return Losses(total, main.detach(), accepted.detach(), counts)
