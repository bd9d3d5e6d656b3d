"""How much of the training is whose. Pure.

Weights make concurrent updates average. Peers announce their tokens per second; once two rounds of a peer are in, what
the ledger got from it corrects what it says, within a factor. A peer that is connected and has announced nothing yet is
taken to be as fast as oneself for a while: three machines that start together must not each count for the whole.
"""

from collections import deque
from dataclasses import dataclass, field

STRETCH = 4.0  # the ledger corrects an announced rate by this factor at most
QUIET = 90.0  # seconds for which a peer that announced nothing counts as being about to
_ROUNDS = 8  # of a peer, remembered
OVERDUE = 4.0  # rounds that an unconnected peer may miss and still count
RAMP = 4  # rounds over which who joined late comes to its full weight


@dataclass
class Pace:
    """One peer's rounds as they came in: (seconds, tokens)."""

    rounds: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_ROUNDS))

    def note(self, now: float, tokens: int) -> None:
        self.rounds.append((now, tokens))

    def unseen(self, now: float) -> float:
        """Tokens/s of a peer we are not connected to, by its rounds alone; 0 before the second, and once the next is
        long overdue."""
        if self.overdue(now) or (span := self.rounds[-1][0] - self.rounds[0][0]) <= 0:
            return 0.0
        return sum(tokens for _, tokens in list(self.rounds)[1:]) / span

    def overdue(self, now: float) -> bool:
        """Whether its next round should have come long ago, or too little is known of it."""
        if len(self.rounds) < 2:
            return True
        span = self.rounds[-1][0] - self.rounds[0][0]
        return now - self.rounds[-1][0] > OVERDUE * span / (len(self.rounds) - 1)

    def rate(self, announced: float) -> float:
        """Tokens/s: as announced, corrected by what came between the first and the last round that is remembered."""
        if (
            announced <= 0
            or len(self.rounds) < 2
            or (span := self.rounds[-1][0] - self.rounds[0][0]) <= 0
        ):
            return announced
        measured = sum(tokens for _, tokens in list(self.rounds)[1:]) / span
        return min(max(measured, announced / STRETCH), announced * STRETCH)


@dataclass(frozen=True)
class Fellow:
    """A connected peer that trains too. `rate`: corrected tokens/s; `since`: when it connected, seconds."""

    rate: float
    since: float


def weight(own: float, fellows: list[Fellow], now: float) -> float:
    """This author's share of all the training going on, in (0, 1]; 1 when nobody else is at it."""
    rates = [fellow.rate or (own if now < fellow.since + QUIET else 0.0) for fellow in fellows]
    if own <= 0:
        return 1.0 / (1 + len(fellows))
    return own / (own + sum(rates))


def ramp(published: int) -> float:
    """The part of its weight that a machine takes which joined late and has published so many rounds since: its moments
    and its momentum know little yet."""
    return min(1.0, (published + 1) / (RAMP + 1))
