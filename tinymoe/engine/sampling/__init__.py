"""From logits to tokens: what options do to logits, the draw, and logprobs."""

from tinymoe.engine.sampling.logits import Row
from tinymoe.engine.sampling.sampler import Sampled, Sampler, gather_logprobs, prompt_logprobs

__all__ = ["Row", "Sampled", "Sampler", "gather_logprobs", "prompt_logprobs"]
