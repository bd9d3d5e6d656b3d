"""How many updates, and how many of their bytes, an author can honestly publish. Pure.

An update that changes nothing has a few bytes of payload, and its header costs every peer a write
to the disk. So updates of one key enter the ledger no faster than its machine can train rounds of
the run's recipe at the rate that its ticket permits, with a margin. What is above that waits; it is
not refused, because in the end all peers must have the same updates. The times are the author's
own, so that what it published over a day arrives in a minute at somebody who was away, and what it
published in a minute takes as long as honest rounds would have taken.

The rule is the generic cell rate algorithm (ITU-T I.371, annex A) with costs in seconds.
"""

from dataclasses import dataclass

from barnraise.exchange.compression.codec import payload_size
from barnraise.spec import AUTO, RunSpec

MARGIN = 1.5  # times what a machine can honestly publish
MIN_ROUND_STEPS = 10  # steps of the shortest round, unless the recipe has shorter ones
WINDOW_STRETCH = 0.7  # of a round's steps, where it ends by the clock
MAX_PARTS = 8  # updates that one round is published in
PARTS_PER_SECOND = 0.5  # parts of a round last at least two seconds
MIN_UPDATES_PER_SECOND = 1 / 30.0
MAX_UPDATES_PER_SECOND = 10.0
BURST_SECONDS = 20.0  # by which an author's updates may be ahead of its pace
MAX_AUTHORS = 4096  # keys that are remembered


@dataclass(frozen=True)
class PaceLimits:
    """What one machine can honestly publish, by the run's recipe.

    Attributes:
        round_tokens: Tokens of the shortest round.
        round_bytes: Bytes that a round is published in.
    """

    round_tokens: float
    round_bytes: int

    @classmethod
    def from_spec(cls, spec: RunSpec) -> "PaceLimits":
        """Return the limits of a run."""
        recipe = spec.recipe
        steps = max(1.0, WINDOW_STRETCH * min(recipe.round_steps, MIN_ROUND_STEPS))
        codec = "dense2" if recipe.codec == AUTO else recipe.codec
        size = sum(payload_size(fragment.size, codec) for fragment in spec.model.fragments())
        return cls(steps * recipe.step_sequences * spec.model.context, size)

    def updates_per_second(self, tokens_per_second: float) -> float:
        """Return how many updates a machine may publish.

        Args:
            tokens_per_second: What its ticket permits.
        """
        rounds = tokens_per_second / self.round_tokens
        honest = min(MAX_PARTS * rounds, max(PARTS_PER_SECOND, rounds))
        return min(MAX_UPDATES_PER_SECOND, max(MIN_UPDATES_PER_SECOND, MARGIN * honest))

    def bytes_per_second(self, tokens_per_second: float) -> float:
        """Return how many bytes of payloads a machine may publish."""
        rounds = max(MIN_UPDATES_PER_SECOND, tokens_per_second / self.round_tokens)
        return MARGIN * rounds * self.round_bytes


class AuthorPace:
    """When the next update of each key may enter the ledger.

    Args:
        limits: What a machine can honestly publish.
    """

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        self._paid_until: dict[str, float] = {}  # key → time up to which its updates have used up

    def ready_at(self, key: str) -> float:
        """Return when the next update of a key may enter the ledger, in seconds since 1970."""
        return self._paid_until.get(key, 0.0) - BURST_SECONDS

    def on_update(self, key: str, size: int, time: float, tokens_per_second: float) -> None:
        """Record an update that entered the ledger.

        Args:
            key: Its author's key, in all incarnations.
            size: Bytes of its payloads.
            time: When it says that it was published, in seconds since 1970.
            tokens_per_second: What its ticket permits.
        """
        cost = max(
            1 / self._limits.updates_per_second(tokens_per_second),
            size / self._limits.bytes_per_second(tokens_per_second),
        )
        paid_until = max(time, self._paid_until.pop(key, 0.0)) + cost
        self._paid_until[key] = paid_until
        if len(self._paid_until) > MAX_AUTHORS:
            del self._paid_until[next(iter(self._paid_until))]
