"""The bundled models' cards: every figure from the saved folders as transformers loads them, in float32 on the CPU."""

from tinymoe.bench.card.command import add_arguments, run

__all__ = ["add_arguments", "run"]
