"""Weight this machine's updates by its share of all training. Pure.

With such weights, concurrent updates average instead of adding up. Peers announce their tokens per
second; once two rounds of a peer have arrived, the rate that the ledger measured corrects the
announced one, within a factor. A peer that is connected and has announced nothing yet counts as
fast as this machine for a while: otherwise three machines that start together would each count for
the whole.
"""

from collections import deque
from dataclasses import dataclass, field

MAX_CORRECTION = 4.0  # factor by which the ledger corrects an announced rate at most
GRACE_SECONDS = 90.0  # for which a connected peer without an announced rate counts as training
MAX_MISSED_ROUNDS = 4.0  # rounds that a peer may be late before it counts as gone
RAMP_ROUNDS = 4  # rounds after which a machine that joined late has its full weight
_ROUNDS = 8  # rounds of a peer that are remembered


@dataclass
class RoundHistory:
    """One peer's last rounds as they arrived: (seconds, training tokens)."""

    rounds: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_ROUNDS))

    def record_round(self, now: float, tokens: int) -> None:
        """Record a round of `tokens` training tokens that arrived at `now`, in seconds."""
        self.rounds.append((now, tokens))

    def measured_rate(self, now: float) -> float:
        """Return the tokens per second over the remembered rounds.

        It is 0 before the second round has arrived, and once the next one is long overdue.
        """
        if self.is_overdue(now):
            return 0.0
        return self._rate() or 0.0

    def is_overdue(self, now: float) -> bool:
        """Return whether the next round is long overdue, or fewer than two rounds have arrived."""
        if len(self.rounds) < 2:
            return True
        return now - self.rounds[-1][0] > MAX_MISSED_ROUNDS * self._span() / (len(self.rounds) - 1)

    def corrected_rate(self, announced: float) -> float:
        """Return the announced tokens per second, corrected by the measured ones within a factor.

        Args:
            announced: The tokens per second that the peer announced; 0 if it announced nothing.
        """
        if announced <= 0:
            return announced
        measured = self._rate()
        if measured is None:
            return announced
        return min(max(measured, announced / MAX_CORRECTION), announced * MAX_CORRECTION)

    def _span(self) -> float:
        """Return the seconds between the first and the last remembered round."""
        return self.rounds[-1][0] - self.rounds[0][0]

    def _rate(self) -> float | None:
        """Return the measured tokens per second; None before two rounds at different times."""
        if len(self.rounds) < 2 or self._span() <= 0:
            return None
        return sum(tokens for _, tokens in list(self.rounds)[1:]) / self._span()


@dataclass(frozen=True)
class TrainingPeer:
    """Another machine that trains.

    Attributes:
        rate: Its tokens per second, corrected by the ledger; 0 if it has not announced any.
        connected_at: When it connected, in seconds.
    """

    rate: float
    connected_at: float


def training_share(own_rate: float, peers: list[TrainingPeer], now: float) -> float:
    """Return this machine's share of all training, in (0, 1]; 1 if no other machine trains.

    Args:
        own_rate: Tokens per second at which this machine trains; 0 if it is not known yet.
        peers: The other machines that train.
        now: The time in seconds.
    """
    if own_rate <= 0:
        return 1.0 / (1 + len(peers))
    rates = [
        peer.rate or (own_rate if now < peer.connected_at + GRACE_SECONDS else 0.0)
        for peer in peers
    ]
    return own_rate / (own_rate + sum(rates))


def weight_ramp(published_rounds: int) -> float:
    """Return the part of its weight that a machine takes which joined late, in (0, 1].

    Its Adam moments and its momentum start empty, so its first updates are less reliable.

    Args:
        published_rounds: The rounds that it has published since it joined.
    """
    return min(1.0, (published_rounds + 1) / (RAMP_ROUNDS + 1))
