"""How much an author, and all authors together, can honestly publish. Pure.

An update that changes nothing has a few bytes of payload, and its header costs every peer a write
to the disk. So updates of one key enter the ledger no faster than its machine can train rounds of
the run's recipe at the rate that its ticket permits, with a margin. What is above that waits; it is
not refused, because in the end all peers must have the same updates. The times are the author's
own, so that what it published over a day arrives in a minute at somebody who was away, and what it
published in a minute takes as long as honest rounds would have taken. The updates of an author that
is ahead of its pace are in no hurry: they enter the ledger once a second, with one write to the
disk. A new incarnation, which costs every peer room for ever, is rarer still.

The rule is the generic cell rate algorithm (ITU-T I.371, annex A) with costs in seconds.
"""

from dataclasses import dataclass, field

from barnraise.ledger.codec import payload_size
from barnraise.planning.round_limits import (
    MAX_PARTS,
    MIN_ROUND_STEPS,
    PACE_MARGIN,
    PARTS_PER_SECOND,
    WINDOW_STRETCH,
)
from barnraise.protocol.table_sizes import MANY, store_newest
from barnraise.spec import AUTO, RunSpec

MIN_UPDATES_PER_SECOND = 1 / 30.0
MAX_UPDATES_PER_SECOND = 10.0
BURST_SECONDS = 20.0  # by which an author's updates may be ahead of its pace
INCARNATION_SECONDS = 60.0  # between two incarnations of a key, on average
INCARNATIONS_BURST_SECONDS = 1200.0  # by which its incarnations may be ahead of that
AHEAD_SECONDS = 2.0  # by which an author's updates may be ahead before they enter in batches
BATCH_SECONDS = 1.0  # between two batches


@dataclass(frozen=True)
class PaceLimits:
    """What one machine can honestly publish, by the run's recipe."""

    round_tokens: float  # tokens of the shortest round
    round_bytes: int  # bytes that a round is published in

    @classmethod
    def from_spec(cls, spec: RunSpec) -> "PaceLimits":
        """Return the limits of a run."""
        recipe = spec.recipe
        steps = max(1.0, WINDOW_STRETCH * min(recipe.round_steps, MIN_ROUND_STEPS))
        codec = "dense2" if recipe.codec == AUTO else recipe.codec
        size = sum(payload_size(fragment.size, codec) for fragment in spec.model.fragments())
        return cls(steps * spec.step_tokens, size)

    def updates_per_second(self, tokens_per_second: float) -> float:
        """Return how many updates a machine may publish, by what its ticket permits."""
        rounds = tokens_per_second / self.round_tokens
        honest = min(MAX_PARTS * rounds, max(PARTS_PER_SECOND, rounds))
        return min(MAX_UPDATES_PER_SECOND, max(MIN_UPDATES_PER_SECOND, PACE_MARGIN * honest))

    def bytes_per_second(self, tokens_per_second: float) -> float:
        """Return how many bytes of payloads a machine may publish."""
        rounds = max(MIN_UPDATES_PER_SECOND, tokens_per_second / self.round_tokens)
        return PACE_MARGIN * rounds * self.round_bytes


@dataclass(frozen=True)
class PacedUpdate:
    """What the pace of an author depends on, of one update."""

    key: str  # the author's key, in all incarnations
    begins: bool  # whether it is the first one of an incarnation
    size: int  # bytes of its payloads
    time: float  # when it says that it was published, in seconds since 1970
    tokens_per_second: float  # what its ticket permits


class AuthorPace:
    """When the next update of each key may enter the ledger."""

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        self._paid_until: dict[str, float] = {}  # key → time up to which its updates have used up
        self._begun_until: dict[str, float] = {}  # key → the same of its incarnations
        self._batch_at: dict[str, float] = {}  # key → when updates of it last entered the ledger

    def ready_at(self, update: PacedUpdate, now: float) -> float:
        """Return when its author's next update may enter the ledger, in seconds since 1970."""
        ready = self._allowed_at(update)
        if self.is_ahead(update.key, now):
            ready = max(ready, self._batch_at.get(update.key, 0.0) + BATCH_SECONDS)
        return ready

    def is_ahead(self, key: str, now: float) -> bool:
        """Return whether a key published more than its machine can have trained by now."""
        return self._paid_until.get(key, 0.0) > now + AHEAD_SECONDS

    def fits_batch(self, update: PacedUpdate, now: float) -> bool:
        """Return whether an update may enter together with the one before it."""
        return self._allowed_at(update) <= now

    def _allowed_at(self, update: PacedUpdate) -> float:
        allowed = self._paid_until.get(update.key, 0.0) - BURST_SECONDS
        if update.begins:
            begun_until = self._begun_until.get(update.key, 0.0)
            allowed = max(allowed, begun_until - INCARNATIONS_BURST_SECONDS)
        return allowed

    def on_batch(self, key: str, now: float) -> None:
        """Record that updates of a key enter the ledger at `now`."""
        store_newest(self._batch_at, key, now, MANY)

    def on_update(self, update: PacedUpdate) -> None:
        """Record an update that enters the ledger."""
        cost = max(
            1 / self._limits.updates_per_second(update.tokens_per_second),
            update.size / self._limits.bytes_per_second(update.tokens_per_second),
        )
        _spend(self._paid_until, update, cost)
        if update.begins:
            _spend(self._begun_until, update, INCARNATION_SECONDS)


def _spend(paid_until: dict[str, float], update: PacedUpdate, cost: float) -> None:
    """Let an update use up `cost` seconds of its author's time, from its own time on."""
    until = max(update.time, paid_until.get(update.key, 0.0)) + cost
    store_newest(paid_until, update.key, until, MANY)


SLACK_SECONDS = 600.0  # of all machines' training may arrive at once, as after a short partition


@dataclass
class GrowthMeter:
    """The growth of a ledger since a machine began to watch it, against what machines can train.

    Each update states no more than its ticket allows since its author's last one. But a key could
    wait for hours and then state all that time at once, and so could many keys together: a run
    would end in a moment. So the growth is also compared with the clock: a leaky bucket fills with
    the tokens of the updates that arrive and leaks at the sum of the rates that the tickets of
    their authors allow.
    """

    # When it began, in seconds since 1970. Updates of an earlier time do not count: a machine that
    # was away catches up.
    started_at: float
    _rates: dict[str, int] = field(default_factory=dict[str, int])  # by key
    _excess: float = 0.0  # tokens
    _leaked_at: float = 0.0

    def on_update(self, key: str, rate: int, tokens: int, time: float, now: float) -> None:
        """Record an update of a key whose ticket allows so many tokens per second.

        Its own time and `now` are in seconds since 1970.
        """
        self._subtract_allowance(now)
        self._rates[key] = rate
        if time > self.started_at:
            self._excess += tokens

    def on_retraction(self, tokens: int, time: float, now: float) -> None:
        """Record that such an update was retracted."""
        self._subtract_allowance(now)
        if time > self.started_at:
            self._excess = max(0.0, self._excess - tokens)

    def grows_too_fast(self, now: float) -> bool:
        """Return whether more tokens arrived lately than the tickets allow to be trained."""
        self._subtract_allowance(now)
        return self._excess > SLACK_SECONDS * self.allowed_rate

    @property
    def allowed_rate(self) -> int:
        """Return the tokens per second that the tickets of all authors seen allow together."""
        return sum(self._rates.values())

    def _subtract_allowance(self, now: float) -> None:
        elapsed = max(0.0, now - max(self._leaked_at, self.started_at))
        self._leaked_at = max(now, self._leaked_at)
        self._excess = max(0.0, self._excess - elapsed * self.allowed_rate)
