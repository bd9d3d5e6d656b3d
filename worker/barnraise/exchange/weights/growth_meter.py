"""Notice a ledger that grows faster than its machines can train. Pure.

Each update states no more than its ticket allows since its author's last one. But a key could wait
for hours and then state all that time at once, and so could many keys together: a run would end in
a moment. So the growth is also compared with the clock: a leaky bucket fills with the tokens of the
updates that arrive and leaks at the sum of the rates that the tickets of their authors allow.
"""

from dataclasses import dataclass, field

SLACK_SECONDS = 600.0  # of all machines' training may arrive at once, as after a short partition


@dataclass
class GrowthMeter:
    """The growth of a ledger since a machine began to watch it.

    Attributes:
        started_at: When it began, in seconds since 1970. Updates of an earlier time do not count:
            a machine that was away catches up.
    """

    started_at: float
    _rates: dict[str, int] = field(default_factory=dict[str, int])  # by key
    _excess: float = 0.0  # tokens
    _leaked_at: float = 0.0

    def on_update(self, key: str, rate: int, tokens: int, time: float, now: float) -> None:
        """Record an update that entered the ledger.

        Args:
            key: Its author's key.
            rate: The tokens per second that its ticket allows.
            tokens: The tokens that it states.
            time: Its time, in seconds since 1970.
            now: The time now.
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
