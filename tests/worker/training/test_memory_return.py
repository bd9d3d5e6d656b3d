"""Test that a paused worker gives memory back, and computes as before afterwards."""

import psutil
import torch

from barnraise.training.memory_return import return_memory


def test_process_that_gave_memory_back_computes_as_before():
    torch.manual_seed(1)
    matrix = torch.randn(64, 64, requires_grad=True)

    def gradient() -> torch.Tensor:
        matrix.grad = None
        torch.nn.functional.gelu(matrix @ matrix).sum().backward()
        assert matrix.grad is not None
        return matrix.grad.clone()

    before = gradient()
    used = psutil.Process().memory_info().rss
    return_memory()
    assert psutil.Process().memory_info().rss < used - 30e6, "the libraries' pages are gone"
    assert torch.equal(gradient(), before)
