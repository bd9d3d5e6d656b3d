"""One fragment's weights as autograd leaves over a flat buffer."""

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from barnraise.models.weights import Weights, views
from barnraise.spec import Fragment
from barnraise.spec.architecture import gradient_chunk


class Leaves:
    """Autograd leaves over a flat buffer, fp32 or bf16, with an fp32 sum of gradients.

    Attributes:
        fragment: the layout of the buffer.
        flat: the buffer, [fragment.size].
        weights: the leaves by name.
    """

    def __init__(self, fragment: Fragment, flat: Tensor) -> None:
        """Make leaves that share the memory of `flat`."""
        self.fragment, self.flat = fragment, flat
        self.weights: Weights = {
            name: view.detach().requires_grad_() for name, view in views(fragment, flat).items()
        }
        self._sums: Weights = {}
        self._hooks: list[RemovableHandle] = []
        if flat.dtype != torch.float32:
            for name, leaf in self.weights.items():
                hook = leaf.register_post_accumulate_grad_hook(
                    lambda leaf, name=name: self._move_gradient(leaf, name)
                )
                self._hooks.append(hook)

    def accumulate_into(self, gradient: Tensor | None) -> None:
        """Let backward add to this fp32 flat buffer from now on; None: to nothing."""
        self._sums = views(self.fragment, gradient) if gradient is not None else {}
        for name, leaf in self.weights.items():
            leaf.grad = self._sums.get(name) if leaf.dtype == torch.float32 else None

    def close(self) -> None:
        """Let the memory go: the hooks would hold it until the garbage collector runs."""
        self.accumulate_into(None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.weights.clear()
        self.flat = self.flat.new_empty(0)

    def add_matrix_gradient(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add leftᵀ · right, [n, rows] and [n, columns], to the gradient of the matrix `name`."""
        sums = self._sums[name]
        if right.dtype == torch.float32:
            sums.addmm_(left.t(), right)
            return
        rows = max(1, gradient_chunk(right.device.type) // right.shape[1])
        for total, part in zip(sums.split(rows), left.split(rows, dim=1), strict=True):
            total.add_(part.t() @ right)

    def add_vector_gradient(self, name: str, gradient: Tensor) -> None:
        """Add to the gradient of the vector `name`."""
        self._sums[name].add_(gradient)

    def _move_gradient(self, leaf: Tensor, name: str) -> None:
        """Add a bf16 leaf's gradient to the fp32 sum; autograd would sum in the leaf's type."""
        assert leaf.grad is not None
        if leaf.device.type == "cpu":
            # A CPU adds tensors of two types by way of an fp32 copy.
            chunk = gradient_chunk("cpu")
            sums = self._sums[name].reshape(-1).split(chunk)
            gradient = leaf.grad.reshape(-1).split(chunk)
            for total, part in zip(sums, gradient, strict=True):
                total.add_(part)
        else:  # one kernel, which widens on the way
            self._sums[name].add_(leaf.grad)
        leaf.grad = None

    def padded_rows(self, name: str, multiple: int) -> Tensor:
        """Return the matrix `name`, with rows up to a multiple if the buffer has so many.

        The rows that pad it are whatever follows it in the buffer.
        """
        slot = next(slot for slot in self.fragment.slots if slot.name == name)
        rows, columns = slot.shape
        rows = -(-rows // multiple) * multiple
        end = slot.offset + rows * columns
        if end > self.fragment.size:
            return self.weights[name]
        return self.flat[slot.offset : end].view(rows, columns)
