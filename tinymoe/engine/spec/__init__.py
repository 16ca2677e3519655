"""Speculative decoding: who proposes tokens, how many, and which of them the model would have produced itself."""
