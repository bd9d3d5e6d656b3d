"""An anchor whose user adds updates itself, as the engine does in a worker."""

import torch

from barnraise.ledger.anchor import Anchor, compute_sketch, initial_weights
from barnraise.spec import ModelSpec


class MemoryAnchor(Anchor):
    """An anchor in memory, for tests and benchmarks without an engine."""

    @classmethod
    def from_seed(cls, model: ModelSpec, seed: int) -> "MemoryAnchor":
        """Create an anchor of initial weights."""
        anchor = cls([initial_weights(fragment, seed) for fragment in model.fragments()])
        anchor.expected_sketches = [compute_sketch(fragment) for fragment in anchor.fragments]
        return anchor

    def add_units(self, index: int, units: torch.Tensor) -> None:
        """Add int32 units to a fragment, mod 2³².

        Once all fragments of an update are added, `record` its header.
        """
        self.fragments[index] = self.fragments[index].add_(units)
