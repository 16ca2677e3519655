"""The door to the kernels, as far as a machine without a GPU can try it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tinymoe.core.model_config import ConfigError
from tinymoe.ops import gpu


def test_steps_become_the_kernels_arguments():
    blocks = [
        np.array([7, 2], dtype=np.int32),
        np.array([5], dtype=np.int32),
        np.array([1, 3, 4], dtype=np.int32),
    ]
    spans = [(0, 1, 20, blocks[0]), (1, 5, 4, blocks[1]), (5, 7, 40, blocks[2])]
    plan = gpu.plan_pages(spans, 64, "cpu")
    assert plan.block_tables.tolist() == [[7, 2, 0], [5, 0, 0], [1, 3, 4]]
    assert plan.query_start.tolist() == [0, 1, 5, 7]
    assert plan.context_lens.tolist() == [20, 4, 40]
    assert {t.dtype for t in plan[:3]} == {torch.int32}
    assert (plan.max_query_len, plan.min_query_len, plan.max_context, plan.window) == (4, 1, 40, 64)


def test_kernels_serve_on_a_gpu_without_gradients(monkeypatch):
    there, here = SimpleNamespace(is_cuda=True), torch.zeros(1)
    monkeypatch.setattr(gpu, "AVAILABLE", True)
    with torch.inference_mode():
        assert gpu.serves(there)
        assert not gpu.serves(here)
    with torch.enable_grad():
        assert not gpu.serves(there)
    monkeypatch.setattr(gpu, "AVAILABLE", False)
    with torch.inference_mode():
        assert not gpu.serves(there)


def test_a_head_dim_without_a_kernel_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(gpu, "AVAILABLE", True)
    monkeypatch.setattr(gpu, "pages", SimpleNamespace(HEAD_DIMS=(32, 64, 128)))
    gpu.check_head_dim(64, torch.device("cuda"))
    gpu.check_head_dim(80, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"must be one of \(32, 64, 128\), and this model's is 80: use device='cpu'"
    ):
        gpu.check_head_dim(80, torch.device("cuda"))
