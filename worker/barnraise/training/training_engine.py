"""The interface of what trains a worker's replica.

`Worker`, `SavedState` and `SampleWriter` use an engine through this protocol alone.
`Worker.plan_training` makes the plan, and `Worker.open_engine` builds the engine for it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from barnraise.ledger import codec
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.swap.engine import EncodedFragment, StepStats
from barnraise.swap.executor import DecodableUpdate, EngineProgress
from barnraise.swap.sampler import SamplingSettings, TokenRange


@dataclass(frozen=True)
class Encoder:
    """Compresses a fragment's part of an update.

    Attributes:
        scheme: names the compression, for engines whose fragments lie on other machines.
    """

    scheme: QuantizationScheme

    def __call__(self, units: Tensor) -> tuple[bytes, Tensor]:
        """Return the payload of int32 [n] units, and the int32 [n] units that it decodes to."""
        return codec.encode(units, scheme=self.scheme)


class EncodedUpdate(DecodableUpdate, Protocol):
    """An update whose payloads can be sent on, to machines that hold the fragments."""

    def read_encoded(self, index: int) -> tuple[bytes, int] | None:
        """Return a fragment's payload and what its units are multiplied by; None for no part."""
        ...


class TrainingEngine(Protocol):
    """What trains a replica and keeps it consistent with the anchor; see `swap.engine.Engine`."""

    @property
    def progress(self) -> EngineProgress:
        """Return how far the state has come; its owner may set it."""
        ...

    @progress.setter
    def progress(self, progress: EngineProgress) -> None: ...

    @property
    def round_tokens(self) -> int:
        """Return the tokens trained on since the last `end_round`."""
        ...

    def step(
        self,
        batches: list[Tensor],
        rate_scale: float = 1.0,
        position: int = 0,
        should_stop: Callable[[], bool] = ...,
    ) -> StepStats:
        """Make one step on the mean gradient of the micro-batches."""
        ...

    def queue_updates(
        self, *updates: EncodedUpdate, prediction: tuple[float, ...] | None = None
    ) -> None:
        """Queue other authors' updates, and set the prediction for updates in flight."""

    def apply_queued(self) -> None:
        """Apply all queued updates and the prediction now, and wait for all operations."""

    def end_round(
        self,
        encode: Encoder,
        weight: float,
        fragments: Collection[int] | None = None,
        carries_residual: bool = False,
        has_momentum: bool = True,
    ) -> Iterator[EncodedFragment]:
        """End the round of some fragments: compute, encode and apply this author's update."""
        ...

    def evaluate(self, batches: Iterable[Tensor], should_stop: Callable[[], bool] = ...) -> float:
        """Return the mean loss of the anchor, in nats a token; NaN if it was stopped."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings, vocabulary: TokenRange
    ) -> Iterator[tuple[int, int]]:
        """Generate text with the anchor; yield the number of the prompt and its next token."""
        ...

    def reset_round(self) -> None:
        """Set the replica to the anchor; drop what the round has learnt, and the prediction."""

    def reset_feedback(self) -> None:
        """Set the error feedback to zero, and drop the round."""

    def reset_momentum(self) -> None:
        """Set the outer momentum to zero."""

    def replace_fragment(self, index: int, units: Tensor) -> None:
        """Replace a fragment of the anchor by int32 [n] units, and drop the round."""

    def flush(self) -> None:
        """Apply the pending update now."""

    def commit(self, closing: bool = False) -> None:
        """Make what lies on disk the state to recover."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that a restart needs besides the anchor's heads."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` of any engine returned, and begin a round."""

    def close(self) -> None:
        """Free the memory; the state stays as the last commit left it."""
