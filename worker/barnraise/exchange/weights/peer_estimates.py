"""Estimate the peers' training speed, updates in flight and round boundaries. Pure.

A machine has few links. Peers beyond them are seen in the ledger, by the rounds that arrive from
them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from barnraise.exchange.gossip.link_state import LinkState
from barnraise.exchange.weights.contribution import ContributionMeter
from barnraise.exchange.weights.delay_compensation import (
    InFlightUpdate,
    estimate_relative_sizes,
    predict_in_flight,
)
from barnraise.exchange.weights.opinion_former import OpinionFormer
from barnraise.exchange.weights.weighting import (
    LostPeers,
    PeerClaim,
    RoundHistory,
    contribution_factors,
    credible_rates,
    grace_seconds,
    is_low_share,
    limit_volunteers,
    training_share,
    typical_step_seconds,
)
from barnraise.ledger.anchor import Withdrawal
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.planning.round_schedule import (
    RoundSchedule,
    align_with_peers,
    choose_schedule,
)
from barnraise.planning.uplink_budget import UplinkUse
from barnraise.protocol.messages import Update
from barnraise.protocol.table_sizes import MANY, store_newest
from barnraise.spec import UPDATES, RunSpec

MAX_DESCRIBED = 64  # volunteers that the log says count for nothing


class LinkTable(Protocol):
    """The connected peers by key. Another thread changes the mappings."""

    @property
    def links(self) -> Mapping[str, LinkState]:
        """Return the connected peers by key."""
        ...

    @property
    def ended(self) -> Mapping[str, None]:
        """Return the peers that are gone and had said that they publish no further update."""
        ...


class PeerEstimates:
    """What one machine knows of the others' training.

    In its methods, `rate` is the tokens per second at which this machine trains, 0 while unknown,
    and `now` the time in seconds.

    Args:
        spec: The run's spec.
        link_table: The connected peers.
        contribution: Compares the contents of updates.
        volunteer: Digest of this machine's own volunteer, who does not lie to this machine.
        find_verdicts: Returns the verdicts and opinions that apply.

    Attributes:
        opinions: What this machine thinks of the other volunteers.
        doubted_volunteers: Digests of those that counted for nothing when others' rates were last
            estimated. Any thread may read them.
    """

    def __init__(
        self,
        spec: RunSpec,
        link_table: LinkTable,
        contribution: ContributionMeter,
        volunteer: str = "",
        find_verdicts: Callable[[], VerdictSet] = VerdictSet,
    ) -> None:
        self.opinions = OpinionFormer()
        self._find_verdicts = find_verdicts
        self._new_rounds = 0.0  # of this machine that its opinions do not contain
        self.doubted_volunteers: tuple[str, ...] = ()
        self._can_judge = True  # False if those that are vouched for hardly agree
        self._spec = spec
        self._recipe = spec.recipe
        self._sizes = tuple(fragment.size for fragment in spec.model.fragments())
        self._step_tokens = spec.step_tokens
        self._link_table = link_table
        self._contribution = contribution
        self._volunteer = volunteer
        self._described_doubts: set[str] = set()  # volunteers
        self._histories: dict[str, RoundHistory] = {}  # by peer, the last one heard of at the end
        self._met_at: dict[str, float] = {}  # volunteer → when one of its machines was first linked
        self._in_flight: dict[tuple[str, int], InFlightUpdate] = {}  # by author and seq
        # for each fragment, training tokens of our last update of it
        self._published_tokens = [0] * len(self._sizes)
        self._last_published_at = 0.0  # seconds since 1970
        # What decides the length of rounds.
        self._steady_rate, self._steady_update_rate = SteadyValue(), SteadyValue()
        self._steady_run_steps = SteadyValue()
        self._round_seconds = 0.0  # of the round that was planned last
        self._lost_peers = LostPeers()
        self._use = UplinkUse(math.inf)  # of the uplink, or how it was while others were linked

    def on_update_received(self, update: Update, now: float) -> None:
        """Record that the training loop received an update, at `now` in seconds."""
        history = self._histories.get(update.peer)
        if history is None or history.volunteer != update.volunteer:
            history = RoundHistory(update.volunteer)
        history.record_round(now, update.tokens, update.time_ms / 1000)
        store_newest(self._histories, update.peer, history, MANY)

    def on_update_published(self, update: Update | Withdrawal, clock: float) -> None:
        """Record that the training loop published an update, at `clock` in seconds since 1970.

        What it withdraws, because it would not count, is compared all the same.
        """
        self._published_tokens = [
            update.tokens if part.size else tokens
            for part, tokens in zip(update.fragments, self._published_tokens, strict=True)
        ]
        self._last_published_at = clock
        changed = sum(part.size > 0 for part in update.fragments)
        self._contribution.record_own_tokens(update.tokens, changed / len(self._sizes))
        self._new_rounds += changed / len(self._sizes)
        agreements = self._compare_contents()
        if round(self._new_rounds, 6) >= 1.0:
            self._new_rounds = 0.0
            self.opinions.record_round(agreements, self.doubted_volunteers, self._can_judge)
        self.opinions.record_harm(agreements, self.doubted_volunteers)

    def training_share(self, rate: float, now: float) -> float:
        """Return this machine's share of all training, in (0, 1]; 1 when it is alone.

        Peers that were lost without a goodbye count on for a while, see `LostPeers`.
        """
        rates = self._count_others(rate, now)
        if any(rates.values()):
            return training_share(rate, [*rates.values()])
        lost = self._lost_rate(now)
        return training_share(rate, [*rates.values(), lost] if lost else [*rates.values()])

    def _count_others(self, rate: float, now: float) -> dict[str, float]:
        """Return the rates at which others count, and remember them in case all are lost."""
        rates = self._credible_rates(rate, now)
        if any(rates.values()):
            self._lost_peers.on_peers(rates, now)
        return rates

    def _lost_rate(self, now: float) -> float:
        """Return the tokens per second at which peers that were lost still count."""
        links = dict(self._link_table.links).values()
        idle = {link.key for link in links if link.has_state and (link.complete or not link.rate)}
        return self._lost_peers.rate(idle | {*self._link_table.ended}, now)

    def describe_low_share(self, rate: float, now: float) -> str | None:
        """Return why this machine hardly counts; None if it does count."""
        rates = self._credible_rates(rate, now)
        share = training_share(rate, [*rates.values()])
        if not is_low_share(share, [*rates.values()]):
            return None
        fastest = max(rates, key=lambda key: rates[key])
        return (
            f"this machine's updates count for {share:.2g} of all training: it trains "
            f"{rate:,.0f} tokens/s and {len(rates)} others {sum(rates.values()):,.0f}, of these "
            f"{fastest[:8]} {rates[fastest]:,.0f}, by its updates"
        )

    def _compare_contents(self) -> dict[str, float]:
        """Return the volunteers' agreements, and record which of them count for nothing."""
        agreements = self._contribution.agreements()
        vouched = self._find_verdicts().vouched or ()
        factors = contribution_factors(agreements, vouched)
        self._can_judge = bool(factors) or agreements.keys().isdisjoint(vouched)
        self.doubted_volunteers = tuple(
            sorted(volunteer for volunteer, factor in factors.items() if not factor)
        )
        return agreements

    def describe_new_doubts(self) -> list[str]:
        """Return a sentence about each volunteer that has begun to count for nothing.

        Each volunteer is described once, and MAX_DESCRIBED volunteers at most.
        """
        machines = {history.volunteer: key[:8] for key, history in self._histories.items()}
        candidates = [
            volunteer
            for volunteer in self.doubted_volunteers
            if volunteer in machines and volunteer not in self._described_doubts
        ]
        described = candidates[: MAX_DESCRIBED - len(self._described_doubts)]
        self._described_doubts.update(described)
        return [
            f"the updates of {machines[volunteer]} state tokens, but their content does not agree "
            "with the updates of others. They take no weight from this machine's updates. The "
            "run's owner can exclude the volunteer"
            for volunteer in described
        ]

    def predict_in_flight(
        self, in_flight: Iterable[Update], rate: float, now: float
    ) -> tuple[float, ...]:
        """Predict what the updates in flight will add, in multiples of our momentum.

        Updates of a peer whose speed is unknown, or which is long overdue, count as nothing. An
        update counts the same until it arrives: an estimate that moved with every rate would move
        the replica at every step.
        """
        estimated_before = self._in_flight
        self._in_flight = {}
        if self._recipe.delay_compensation:
            for update in sorted(in_flight, key=lambda update: update.seq):
                history = self._histories.get(update.peer)
                if history is None or history.is_overdue(now):
                    continue
                identity = update.author, update.seq
                estimate = estimated_before.get(identity) or self._estimate(update, rate, now)
                self._in_flight[identity] = estimate
        return predict_in_flight(self._recipe, self._in_flight.values(), len(self._sizes))

    def plan_round(
        self, rate: float, use: UplinkUse, now: float, clock: float, allow_streaming: bool = True
    ) -> RoundSchedule:
        """Plan the next round: its length, its end and how its update is compressed.

        It is as the recipe says or the uplink allows. Unless no other machine trains or the
        recipe's strategy is "async", it ends together with the others' rounds.

        Args:
            rate: Tokens per second at which this machine trains; 0 if it is not known yet.
            use: What the uplink carries, as measured, but for the number of machines.
            now: The time in seconds.
            clock: The time in seconds since 1970.
            allow_streaming: Whether the round may be published in parts, if the recipe wants that.
        """
        others = sum(other > 0 for other in self._count_others(rate, now).values())
        links = dict(self._link_table.links)
        if links:
            self._use = replace(use, machines=1 + self._count_receivers(links, now))
        elif self._lost_rate(now):
            self._use = replace(self._use, rate=use.rate)  # they will need what it publishes
        else:
            self._use = UplinkUse(use.rate)
        steady_rate = self._steady_rate.update(rate)
        step_seconds = self._step_tokens / steady_rate if steady_rate else None
        # Of the run's steps, this machine makes as many as its share of all training.
        run_steps = self._recipe.token_budget * self.training_share(rate, now) / self._step_tokens
        alone = choose_schedule(
            self._spec,
            self._steady_update_rate.update(self._use.update_rate),
            step_seconds,
            self._steady_run_steps.update(run_steps),
        )
        self._round_seconds = alone.steps * (step_seconds or 0.0)
        if step_seconds is None or self._recipe.strategy == "async" or not others:
            return alone
        measured = [history.measured_rate(now) or 0.0 for history in self._histories.values()]
        typical = typical_step_seconds(step_seconds, self._step_tokens, measured)
        aligned = align_with_peers(
            self._recipe, alone, step_seconds, typical, clock, self._spec.max_round_steps
        )
        if allow_streaming and self._recipe.strategy in ("streams", UPDATES):
            aligned = aligned.with_streaming(self._sizes, self._last_published_at, clock)
        self._round_seconds = aligned.period
        return aligned

    def _count_receivers(self, links: Mapping[str, LinkState], now: float) -> int:
        """Count the others that need each update: those linked, and those heard of lately.

        One that is late needs it as well; without it rounds are so short that more are late.
        """
        since = now - grace_seconds(self._round_seconds)
        away = self._histories.keys() - links.keys() - {*self._link_table.ended}
        heard = sum(self._histories[key].rounds[-1][0] >= since for key in away)
        return heard + sum(not link.complete for link in links.values())

    def _credible_rates(self, rate: float, now: float) -> dict[str, float]:
        """Return the tokens per second at which the other machines count, by key.

        They are those that links lead to and those whose rounds arrive.
        """
        links = dict(self._link_table.links)
        suspended = self._find_verdicts().suspended
        claims = {
            key: self._claim(key, link, now)
            for key, link in links.items()
            if not link.complete and link.volunteer not in suspended and self._counts(link)
        }
        ended = self._link_table.ended
        for key, history in self._histories.items():
            is_away = key not in links and key not in ended
            if is_away and history.measured_rate(now) and history.volunteer not in suspended:
                volunteer = self._other_volunteer(history.volunteer)
                claims[key] = PeerClaim(volunteer, measured=history.measured_rate(now))
        recipe_seconds = self._recipe.round_steps * self._step_tokens / rate if rate else 0.0
        grace = grace_seconds(max(recipe_seconds, self._round_seconds))
        rates = credible_rates(rate, [*claims.values()], now, grace)
        if rate:
            agreements = self._compare_contents()
            vouched = self._find_verdicts().vouched or ()
            rates = limit_volunteers(rate, [*claims.values()], rates, agreements, vouched)
        return dict(zip(claims, rates, strict=True))

    def _counts(self, link: LinkState) -> bool:
        """Return whether updates of a connected peer count: it is no newcomer, or admitted."""
        is_newcomer = link.meeting.newcomer and link.key not in self._histories
        return not is_newcomer or self._find_verdicts().admits(link.volunteer)

    def _other_volunteer(self, volunteer: str) -> str:
        """Return a volunteer; the empty string if it is this machine's own."""
        return "" if volunteer == self._volunteer else volunteer

    def _claim(self, key: str, link: LinkState, now: float) -> PeerClaim:
        """Return what is known of the speed of a connected peer."""
        history = self._histories.get(key)
        measured = history.measured_rate(now) if history else None
        if link.volunteer == self._volunteer:
            return PeerClaim("", link.rate, measured, link.connected_at)
        # The grace is the volunteer's: another key, or another connection, does not renew it.
        met_at = self._met_at.get(link.volunteer, link.connected_at)
        store_newest(self._met_at, link.volunteer, met_at, MANY)
        return PeerClaim(link.volunteer, link.rate, measured, met_at)

    def _estimate(self, update: Update, rate: float, now: float) -> InFlightUpdate:
        """Estimate the relative size of an update, if we train `rate` tokens per second."""
        their_rate = self._credible_rates(rate, now).get(update.peer, 0.0)
        has_payload = [part.size > 0 for part in update.fragments]
        relative_sizes = estimate_relative_sizes(
            has_payload, update.tokens, their_rate, self._published_tokens, rate
        )
        return InFlightUpdate(update.author, all(has_payload), relative_sizes)


MAX_DRIFT = 0.15  # of the lower of two values, by which they may differ and count as the same


class SteadyValue:
    """A measured value that changes only when the measurement has clearly changed.

    The length of a round is a power of two of seconds. Near the edge between two lengths every
    measurement's noise would choose the other one: rounds then end early with little learnt or
    twice as late, and peers estimate this machine's speed from them.
    """

    def __init__(self) -> None:
        self._value: float | None = None

    def update(self, measured: float) -> float:
        """Return the value after a measurement of 0 or more; inf and 0 differ from all others."""
        value = self._value
        if value is not None and abs(measured - value) <= MAX_DRIFT * min(measured, value):
            return value
        self._value = measured
        return measured
