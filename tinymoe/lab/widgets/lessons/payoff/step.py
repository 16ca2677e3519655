"""What one step of a model must read and multiply, and the least time that this takes.

Bytes: every weight that the step needs, once, and the keys and values of each sequence, once. Activations and launches are
left out, so the time is a bound from below, and what follows from it for speculation is an estimate, not a measurement.
"""

from collections.abc import Callable
from typing import NamedTuple

from tinymoe.core.model_config import ModelConfig

Visits = Callable[[int], float]  # tokens of a step -> distinct experts of one layer


def independent(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens visit if each chooses top_k of them evenly, and for itself."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def expected_tokens(rate: float, depth: int) -> float:
    """Of one verification, if each draft is kept with chance `rate`: Leviathan et al. (arXiv 2211.17192)."""
    return sum(rate**i for i in range(depth + 1))


class Machine(NamedTuple):
    """Bytes a second, and operations a second."""

    bandwidth: float
    peak: float


class StepCost:
    """Steps of a model whose numbers have `width` bytes. context: tokens that each sequence has in its cache.

    visits: distinct experts of a layer with experts; by default those of independent choices.
    """

    def __init__(
        self, config: ModelConfig, *, width: int = 2, context: int = 128, visits: Visits | None = None
    ):
        self.config, self.width, self.context = config, width, context
        self._visits = visits
        self.experts, self.top_k = config.max_experts, config.max_top_k
        moes = [layer.moe for layer in config.layers if layer.moe is not None]
        self.expert = [
            3 * config.hidden_size * moe.intermediate_size for moe in moes
        ]  # numbers of one expert
        self.active = config.num_parameters(active=True)
        self.fixed = self.active - sum(n * moe.top_k for n, moe in zip(self.expert, moes))

    def visits(self, tokens: int) -> float:
        """Distinct experts of one layer; 0 without experts."""
        if not self.experts:
            return 0.0
        return self._visits(tokens) if self._visits else independent(self.experts, self.top_k, tokens)

    def weights(self, tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads."""
        return self.width * (self.fixed + self.visits(tokens) * sum(self.expert))

    def moved(self, tokens: int, sequences: int = 1) -> float:
        """Bytes of weights, and of keys and values."""
        cache = sequences * self.context * self.config.kv_elements_per_token
        return self.weights(tokens) + self.width * cache

    def operations(self, tokens: int) -> float:
        """Multiplications and additions; attention over the context with them."""
        c = self.config
        attention = 4 * self.context * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        return tokens * (2.0 * self.active + attention)

    def seconds(self, tokens: int, machine: Machine, sequences: int = 1) -> float:
        """The roofline: reading or multiplying, whichever takes longer."""
        reading = self.moved(tokens, sequences) / machine.bandwidth
        return max(reading, self.operations(tokens) / machine.peak)  # shown by "why?": #longer-of-two

    def speedup(self, requests: int, depth: int, rate: float, machine: Machine, draft: float = 0.0) -> float:
        """Of speculation over plain decoding, for `requests` sequences. draft: one drafted place, as a share of a plain
        step."""
        plain = self.seconds(requests, machine, requests)
        verify = self.seconds(requests * (depth + 1), machine, requests)
        return expected_tokens(rate, depth) / (verify / plain + depth * draft)

    def best_depth(self, requests: int, most: int, rate: float, machine: Machine, draft: float = 0.0) -> int:
        """The depth of the largest speed-up, 0 allowed; of equal ones the smallest."""
        return max(range(most + 1), key=lambda k: (self.speedup(requests, k, rate, machine, draft), -k))
