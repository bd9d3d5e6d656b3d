"""Detect what an owner should look at: a rising loss, a budget that ends, a machine that is slow.

Each detector makes the same few queries however many runs there are.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Exists, F, OuterRef, Q, Window
from django.db.models.functions import RowNumber

from barnraise.formats import format_share
from barnraise.protocol.enums import Activity, RunStatus
from coordinator.fleet.marked_names import isolate_name
from coordinator.fleet.models import Membership
from coordinator.notify.drafts import draft_for_run, machine_data, run_data
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.runs.models import Run
from coordinator.telemetry.models import LossPoint, Rollup

RECENT = timedelta(minutes=5)  # runs whose machines report
RISES = 3  # in a row
BUDGET_SHARE = 0.9
SLOW_SHARE = 0.5  # of the usual speed
SPEED_NOW = timedelta(minutes=10)
USUAL_SPEED = timedelta(hours=24)
MIN_HOURS = 3  # of training within them, before a speed is usual
Curve = list[tuple[int, float]]  # (ledger tokens, nats per token), ascending in tokens


def detect_alerts(now: datetime) -> Iterator[NotificationDraft]:
    """Detect all alert conditions."""
    runs = list(_training_runs(now))
    yield from detect_diverged(now)
    yield from detect_rising(runs)
    yield from detect_budget(runs)
    yield from detect_slow(now)


def _training_runs(now: datetime) -> Iterator[Run]:
    """Yield the runs in training whose machines report."""
    recent = Membership.everywhere.filter(run=OuterRef("pk"), last_seen__gt=now - RECENT)
    training = Run.objects.filter(Exists(recent), status=RunStatus.TRAINING)
    yield from training.select_related("owner")


def detect_diverged(now: datetime) -> Iterator[NotificationDraft]:
    """Detect machines whose losses or gradients are not finite, once a day for each."""
    members = Membership.objects.filter(
        last_seen__gt=now - RECENT, abandoned_steps__gt=0, run__status=RunStatus.TRAINING
    )
    for member in members.select_related("run__owner", "machine__owner"):
        machine = member.machine
        yield draft_for_run(
            member.run,
            member.run.owner,
            NotificationType.RUN_DIVERGED,
            f"{member.run.name}: a loss is not finite",
            f"{machine.name} of {isolate_name(machine.owner.shown_name)} has dropped "
            f"{member.abandoned_steps:,} steps whose loss or gradient was not finite. If all "
            "machines do, the learning rate is too high.",
            episode=f"{machine.pk}:{now:%Y%m%d}",
        )


def detect_rising(runs: Sequence[Run]) -> Iterator[NotificationDraft]:
    """Detect runs whose validation loss has risen three times in a row.

    All machines evaluate the same weights on the same text. Each person has the curve of the
    machine with most tokens; which of them count says `choose_rising_curve`.
    """
    # A machine that states more tokens than a run can have would be a person's first for ever.
    plausible = Q(pk__in=[])
    for run in runs:
        plausible |= Q(run=run, ledger_tokens__lte=run.max_plausible_tokens)
    leaders = Membership.everywhere.filter(plausible).order_by(
        "run", "machine__owner", "-ledger_tokens", "pk"
    )
    places = leaders.distinct("run", "machine__owner").values_list("pk", "run", "machine__owner")
    leader_of = {pk: (run, person) for pk, run, person in places}
    place = Window(RowNumber(), partition_by="membership", order_by=F("tokens").desc())
    points = (
        LossPoint.objects.filter(membership__in=leader_of, kind="validation")
        .annotate(place=place)
        .filter(place__lte=RISES + 1)
        .order_by("membership", "tokens")
    )
    curves: dict[Any, dict[Any, Curve]] = defaultdict(lambda: defaultdict(list))
    for membership, tokens, loss in points.values_list("membership", "tokens", "loss"):
        run_key, person = leader_of[membership]
        curves[run_key][person].append((tokens, loss))
    for run in runs:
        curve = choose_rising_curve(curves.get(run.pk, {}), run.owner_id)
        if curve is not None:
            yield draft_for_run(
                run,
                run.owner,
                NotificationType.RUN_RISING,
                f"{run.name}: the validation loss rises",
                f"It rose {RISES} times in a row, from {curve[0][1]:.3f} to {curve[-1][1]:.3f}. "
                "The learning rate may be too high, or the text has been read too often.",
                episode=str(curve[-1][0] // max(1, run.spec.recipe.evaluate_every * (RISES + 1))),
            )


def choose_rising_curve(curves: Mapping[Any, Curve], owner: Any) -> Curve | None:
    """Return a curve that shows that a run's loss rises; None if its people do not agree on it.

    The owner's own machine decides. Otherwise more than half of the people must report a rise, and
    two at least, unless only one reports at all. The curves are the last losses of each person's
    machine, by tokens.
    """
    complete = {person: curve for person, curve in curves.items() if len(curve) > RISES}
    if owner in complete:
        complete = {owner: complete[owner]}
    rising = [curve for curve in complete.values() if has_risen([loss for _, loss in curve])]
    if not rising or 2 * len(rising) <= len(complete):
        return None
    return sorted(rising, key=lambda curve: curve[-1][1] - curve[0][1])[(len(rising) - 1) // 2]


def has_risen(losses: Sequence[float]) -> bool:
    """Return whether the last losses are one more than `RISES` and each is above the one before."""
    newest = losses[-RISES - 1 :]
    pairs = itertools.pairwise(newest)
    return len(newest) == RISES + 1 and all(earlier < later for earlier, later in pairs)


def detect_budget(runs: Sequence[Run]) -> Iterator[NotificationDraft]:
    """Detect runs that have spent most of their budget, once for each budget."""
    for run in runs:
        if BUDGET_SHARE * run.token_budget <= run.ledger_tokens < run.token_budget:
            yield draft_for_run(
                run,
                run.owner,
                NotificationType.RUN_BUDGET,
                f"{run.name} has spent {format_share(BUDGET_SHARE)} of its budget",
                "While tokens are left you can extend the budget under “Access and notes”.",
                episode=str(run.token_budget),
            )


def detect_slow(now: datetime) -> Iterator[NotificationDraft]:
    """Detect machines that train at less than half the speed of the last day, once a day."""
    members = Membership.objects.filter(
        last_seen__gt=now - RECENT,
        activity=Activity.TRAINING,
        run__status=RunStatus.TRAINING,
        machine__revoked=None,
    )
    by_pk = {member.pk: member for member in members.select_related("run", "machine__owner")}
    usual = _mean_rates(by_pk, 3600, now - USUAL_SPEED, MIN_HOURS)
    current = _mean_rates([pk for pk in by_pk if pk in usual], 60, now - SPEED_NOW, 1)
    for pk, rate in current.items():
        member, usual_rate = by_pk[pk], usual[pk]
        if rate >= SLOW_SHARE * usual_rate:
            continue
        yield NotificationDraft(
            person=member.machine.owner,
            kind=NotificationType.MACHINE_SLOW,
            key=f"slow:{member.machine.pk}:{now:%Y%m%d}",
            title=f"{member.machine.name} has become slow",
            text=f"In {member.run.name} it trains {rate:,.0f} tokens/s; over the last day it "
            f"trained {usual_rate:,.0f}. Other programs may use its processor, GPU or disk.",
            url=f"/machines/{member.machine.pk}/",
            data={"machine": machine_data(member.machine), "run": run_data(member.run)},
        )


def _mean_rates(members: Any, width: int, since: datetime, least: int) -> dict[Any, float]:
    """Return the median over intervals of each machine's mean rate, in tokens per second.

    Args:
        members: ids of memberships.
        width: seconds of an interval.
        since: the beginning of the first interval.
        least: intervals that a machine must have.
    """
    rows = Rollup.objects.filter(
        membership__in=list(members), width=width, bucket__gte=since.timestamp(), reports__gt=0
    )
    rates: dict[Any, list[float]] = defaultdict(list)
    for membership, rate_sum, reports in rows.values_list("membership", "rate_sum", "reports"):
        rates[membership].append(rate_sum / reports)
    return {
        pk: statistics.median(values)
        for pk, values in rates.items()
        if len(values) >= least and statistics.median(values) > 0
    }
