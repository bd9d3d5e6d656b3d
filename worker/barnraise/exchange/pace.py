"""How much of the training is whose: the weight of one's update, so that concurrent updates average. Pure.

Peers announce their tokens per second; once two rounds of a peer are in, what the ledger got from it corrects what it
says, within a factor. A peer that is connected and has announced nothing yet is taken to be as fast as oneself for a
while: three machines that start together must not each count for the whole.
"""

from collections import deque
from dataclasses import dataclass, field

STRETCH = 4.0  # the ledger corrects an announced rate by this factor at most
QUIET = 90.0  # seconds for which a peer that announced nothing counts as being about to
_ROUNDS = 8  # of a peer, remembered


@dataclass
class Pace:
    """One peer's rounds as they came in: (seconds, tokens)."""

    rounds: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_ROUNDS))

    def note(self, now: float, tokens: int) -> None:
        self.rounds.append((now, tokens))

    def rate(self, announced: float) -> float:
        """Tokens/s: as announced, corrected by what came between the first and the last round that is remembered."""
        if announced <= 0 or len(self.rounds) < 2 or (span := self.rounds[-1][0] - self.rounds[0][0]) <= 0:
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
