"""Text in and out: the tokenizer of a folder, chat templates, incremental detokenising, stop strings."""

from tinymoe.text.detokenize import IncrementalDetokenizer
from tinymoe.text.stop import TextState
from tinymoe.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "TextState", "Tokenizer"]
