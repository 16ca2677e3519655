"""The whole engine on a GPU, beside vLLM."""
