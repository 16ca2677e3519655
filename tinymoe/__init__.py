"""tinymoe: a small engine that teaches how Mixture-of-Experts language models are served, and serves them."""

from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import ModelConfig
from tinymoe.core.outputs import CompletionOutput, RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.llm import LLM, Delta

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
]
