"""A model as a run has trained it: what all export formats are written from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.errors import StateError
from barnraise.spec import Fragment, ModelSpec
from barnraise.swap.precision import units_to_float
from barnraise.training.model_files.model_card import CardFacts

# What an export's weights can be written in, by the name that people give.
EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainedModel:
    """A model to export."""

    model: ModelSpec
    # A state as `Engine.state_dict` names it; of it, `anchor.<i>` (int32 [n]).
    tensors: Mapping[str, Tensor]
    # Content of the run's tokenizer file; None for plain bytes.
    tokenizer: bytes | None = None
    # What the model card states; None writes no card.
    facts: CardFacts | None = None

    def check(self, fragments: Iterable[Fragment] | None = None) -> None:
        """Check that all fragments are here, before anything is written.

        Raises:
            StateError: A fragment is missing or of another shape.
        """
        for fragment in fragments or self.model.fragments():
            self._units_of(fragment)

    def load(self, fragment: Fragment) -> Tensor:
        """Return a fragment's weights, fp32 [n]."""
        return units_to_float(self._units_of(fragment))

    def _units_of(self, fragment: Fragment) -> Tensor:
        units = self.tensors.get(f"anchor.{fragment.index}")
        if units is None or units.shape != (fragment.size,):
            raise StateError(f"the state has no {fragment.name} of this model to export")
        return units
