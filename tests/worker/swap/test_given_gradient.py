"""Test the backward from a given gradient against torch's own."""

import torch
from helpers.python_code import run_python

from barnraise.swap.given_gradient import run_backward

CODE = """
import sys
import torch
from barnraise.swap.given_gradient import run_backward

x = torch.ones(3, requires_grad=True)
run_backward(x.exp(), torch.ones(3))
print(x.grad is not None, "sympy" in sys.modules)
"""


def test_gradients_are_added_with_the_bits_of_torch():
    generator = torch.Generator().manual_seed(1)
    x, weight, gradient = (torch.randn(8, 8, generator=generator) for _ in range(3))

    def compute(run):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        for _ in range(2):
            output = torch.tanh(leaves[0] @ leaves[1])
            with torch.no_grad():
                run(output, gradient)
        return [leaf.grad for leaf in leaves]

    expected = compute(lambda output, given: output.backward(given))
    assert all(map(torch.equal, compute(run_backward), expected))


def test_gradient_of_another_type_is_converted_as_torch_does():
    x = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    run_backward(x * 2, torch.ones(4))
    assert x.grad is not None and x.grad.dtype == torch.bfloat16 and (x.grad == 2).all()


def test_sympy_is_not_imported():
    done = run_python(CODE)
    assert done.stdout.split() == ["True", "False"], done.stderr
