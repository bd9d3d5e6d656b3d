"""Weight this machine's updates by its share of all training. Pure.

With such weights, concurrent updates average instead of adding up. What a peer announces is never
evidence: it can only lower the rate that its rounds in the ledger show. Until two rounds of a peer
have arrived it counts at most as much as this machine, and only for a while: if it did not count
at all, three machines that start together would each count for the whole.

The tokens that rounds state are no proof either. Volunteers whose updates do not agree with the
updates of others count for less (`contribution.py` measures the agreement).

A machine that loses all others at once is most likely cut off itself, and they train on. What it
publishes meanwhile is added to what they publish, so it must not count for the whole (`LostPeers`).
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from barnraise.planning.round_limits import (
    GRACE_ROUNDS,
    MAX_MISSED_ROUNDS,
    RAMP_ROUNDS,
    REMEMBERED_ROUNDS,
)

MAX_EXCESS = 1.5  # times the measured rate that an announced rate counts at most
GRACE_SECONDS = 90.0  # for which a peer counts before its second round, at least
MIN_ROUND_FRACTION = 0.25  # of the recipe's steps that peers can shorten this machine's rounds to
NOTABLE_SHARE = 0.1  # of an equal share, below which a machine's share is worth a line in the log
# A volunteer with the lower agreement counts for nothing, one with the higher agreement in full.
# Honest machines have agreements of 0.2 to 0.8. Noise has an agreement of 0 ± 0.02.
NO_AGREEMENT = 0.05
FULL_AGREEMENT = 0.15


@dataclass
class RoundHistory:
    """One peer's last rounds."""

    volunteer: str = ""  # digest of the peer's volunteer
    # (seconds of arrival, training tokens, seconds as the peer states them).
    rounds: deque[tuple[float, int, float]] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED_ROUNDS)
    )

    def record_round(self, now: float, tokens: int, stated_at: float = 0.0) -> None:
        """Record a round that arrived at `now` and that its author signed at `stated_at`.

        Rounds that arrive together count as one. A peer that was away begins again: the time for
        which it was away says nothing about its speed.
        """
        if self.rounds and self.rounds[-1][0] >= now:
            tokens += self.rounds.pop()[1]
        elif len(self.rounds) > 1 and self.is_overdue(now):
            self.rounds.clear()
        self.rounds.append((now, tokens, stated_at))

    def measured_rate(self, now: float) -> float | None:
        """Return the tokens per second over the remembered rounds.

        It is None before the second round has arrived, and 0 once the next one is long overdue.
        Rounds that arrive faster than their headers state are a backlog: the headers' times bound
        their tokens, so that the longer time counts.
        """
        if len(self.rounds) < 2:
            return None
        if self.is_overdue(now):
            return 0.0
        stated = self.rounds[-1][2] - self.rounds[0][2]
        return sum(tokens for _, tokens, _ in list(self.rounds)[1:]) / max(
            self._span_seconds(), stated
        )

    def is_overdue(self, now: float) -> bool:
        """Return whether the next round is long overdue, or fewer than two rounds have arrived."""
        if len(self.rounds) < 2:
            return True
        return now - self.rounds[-1][0] > MAX_MISSED_ROUNDS * self._span_seconds() / (
            len(self.rounds) - 1
        )

    def _span_seconds(self) -> float:
        """Return the seconds between the first and the last remembered round."""
        return self.rounds[-1][0] - self.rounds[0][0]


@dataclass(frozen=True)
class PeerClaim:
    """How fast another machine trains, as it says and as its rounds show."""

    volunteer: str = ""  # digest of its volunteer; empty if that is this machine's own
    # Tokens per second that it announces, 0 before it does; None if no link leads to it.
    announced: float | None = None
    # Tokens per second of its rounds in the ledger; None before the second one.
    measured: float | None = None
    met_at: float = 0.0  # when this machine first met its volunteer, in seconds


def grace_seconds(round_seconds: float) -> float:
    """Return for how many seconds a volunteer's machines count before their second rounds."""
    return max(GRACE_SECONDS, GRACE_ROUNDS * round_seconds)


def credible_rates(
    own_rate: float, claims: Sequence[PeerClaim], now: float, grace: float = GRACE_SECONDS
) -> list[float]:
    """Return the tokens per second at which other machines count, to one of `own_rate`.

    A machine counts by its rounds, and by what it announces where that is less. Before its second
    round it counts at most as much as this machine, for `grace` seconds after its volunteer was
    met. All such machines of one volunteer together count at most as much as this one.

    Returns:
        A rate for each claim, in their order.
    """
    rates: list[float] = []
    unmeasured: dict[str, float] = defaultdict(float)  # volunteer → rates of its new machines
    for claim in claims:
        if claim.measured is not None:
            announced = claim.measured if claim.announced is None else claim.announced
            rates.append(min(announced, MAX_EXCESS * claim.measured))
        elif claim.announced is None or now >= claim.met_at + grace:
            rates.append(0.0)
        else:
            rates.append(min(claim.announced or own_rate, own_rate))
            unmeasured[claim.volunteer] += rates[-1]
    return [
        rate * own_rate / unmeasured[claim.volunteer]
        if claim.measured is None and claim.volunteer and unmeasured[claim.volunteer] > own_rate
        else rate
        for claim, rate in zip(claims, rates, strict=True)
    ]


def limit_volunteers(
    own_rate: float,
    claims: Sequence[PeerClaim],
    rates: Sequence[float],
    agreements: Mapping[str, float],
    vouched: Collection[str] = (),
) -> list[float]:
    """Lower the rates of volunteers whose updates do not show the training that they state.

    First, the volunteers are compared by the content of their updates (`contribution_factors`).
    Second, the rate of a volunteer that is not proven to contribute is limited. The limit is the
    sum of the rates of this machine, of all proven volunteers and of all slower volunteers. A
    stranger that states any number of tokens therefore takes at most half of this machine's weight.
    A volunteer that really trains so fast is hardly affected: its updates are much larger than this
    machine's updates, so that the weight of the latter matters little.

    Args:
        own_rate: Tokens per second at which this machine trains.
        claims: What is known of the others.
        rates: The tokens per second at which they would count, in the same order.
        agreements: Volunteer → agreement of its updates with this machine's updates, in [-1, 1].
            Volunteers without enough updates are absent; see `contribution.py`.
        vouched: The volunteers that are vouched for.

    Returns:
        A rate for each claim, in their order.
    """
    factors = contribution_factors(agreements, vouched)
    sums: dict[str, float] = defaultdict(float)  # volunteer → tokens per second
    for claim, rate in zip(claims, rates, strict=True):
        sums[claim.volunteer] += rate * factors.get(claim.volunteer, 1.0)
    # The volunteer "" is this machine's own, whose machines need no proof.
    proven = {""} | {name for name, value in agreements.items() if value >= FULL_AGREEMENT}
    counted = own_rate + sum(sums.get(volunteer, 0.0) for volunteer in proven)
    unproven = [volunteer for volunteer in sums if volunteer not in proven]
    for volunteer in sorted(unproven, key=lambda name: sums[name]):
        limited = min(sums[volunteer], counted)
        if sums[volunteer]:
            factors[volunteer] = factors.get(volunteer, 1.0) * limited / sums[volunteer]
        counted += limited
    return [
        rate * factors.get(claim.volunteer, 1.0) for claim, rate in zip(claims, rates, strict=True)
    ]


def contribution_factors(
    agreements: Mapping[str, float], vouched: Collection[str] = ()
) -> dict[str, float]:
    """Return the part of its rate for which each volunteer counts, in [0, 1].

    Args:
        agreements: Volunteer → agreement of its updates with this machine's updates, in [-1, 1].
        vouched: The volunteers that are vouched for. If there are some among those compared, only
            they show whether agreement proves anything: the number of strangers does not.

    Returns:
        An empty dictionary if fewer than half of the volunteers agree with this machine. Late in a
        training, or when the machines read different texts, low agreement proves nothing.
    """
    compared = [agreements[other] for other in vouched if other in agreements]
    compared = compared or [*agreements.values()]
    agreeing = sum(agreement >= FULL_AGREEMENT for agreement in compared)
    if 2 * agreeing < len(compared):
        return {}
    width = FULL_AGREEMENT - NO_AGREEMENT
    return {
        volunteer: min(1.0, max(0.0, (agreement - NO_AGREEMENT) / width))
        for volunteer, agreement in agreements.items()
    }


def training_share(own_rate: float, rates: Sequence[float]) -> float:
    """Return this machine's share of all training, in (0, 1]; 1 if no other machine trains.

    Rates are in tokens per second; its own one is 0 while it is not known.
    """
    if own_rate <= 0:
        return 1.0 / (1 + len(rates))
    return own_rate / (own_rate + sum(rates))


@dataclass
class LostPeers:
    """How fast others trained when the last of them was lost.

    A machine without peers counts them in full for as long as they had trained together, and less
    and less from then on, as it becomes likelier that they are gone. If they are, this machine's
    updates are smaller than they could be for a while. If they were not counted and come back, the
    changes of both sides would add up, instead of averaging, to twice as much and more.
    """

    # Tokens per second of each that trained, by key.
    rates: dict[str, float] = field(default_factory=dict[str, float])
    met_at: float = 0.0  # since when at least one of them trained, in seconds
    lost_at: float = 0.0  # when one of them trained last, in seconds

    def on_peers(self, rates: Mapping[str, float], now: float) -> None:
        """Record at which tokens per second others train now; at least one does."""
        if not self.rates:
            self.met_at = now
        self.rates = {key: rate for key, rate in rates.items() if rate > 0}
        self.lost_at = now

    def rate(self, idle: Collection[str], now: float) -> float:
        """Return at how many tokens per second they count now, but for those known to be idle."""
        total = sum(rate for key, rate in self.rates.items() if key not in idle)
        together, alone = self.lost_at - self.met_at, now - self.lost_at
        return total if alone <= together else total * together / alone


def is_low_share(share: float, rates: Sequence[float]) -> bool:
    """Return whether a share is so small that the machine hardly counts."""
    return share < NOTABLE_SHARE / (1 + sum(rate > 0 for rate in rates))


def typical_step_seconds(own_seconds: float, step_tokens: int, measured: Iterable[float]) -> float:
    """Return the length of a step at the median machine's speed.

    One machine, whatever its rounds claim, moves a median little; and no number of machines
    shortens this machine's rounds below MIN_ROUND_FRACTION of the recipe's steps.
    """
    rates = [step_tokens / own_seconds, *(rate for rate in measured if rate > 0)]
    return max(step_tokens / statistics.median(rates), MIN_ROUND_FRACTION * own_seconds)


def weight_ramp(published_rounds: int) -> float:
    """Return the part of its weight that a machine takes which joined late, in (0, 1].

    Its Adam moments and its momentum start empty, so its first updates are less reliable.
    """
    return min(1.0, (published_rounds + 1) / (RAMP_ROUNDS + 1))
