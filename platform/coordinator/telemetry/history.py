"""A run's history from Postgres, thinned to what a chart can show."""

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection
from django.db.models import Max

from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership
from coordinator.fleet.token_limits import volunteer_rate
from coordinator.runs.models import Run
from coordinator.telemetry.models import BUCKET_SECONDS, BUCKET_WIDTHS

MAX_POINTS = 600  # of a curve
MAX_MACHINE_POINTS = 200  # of one machine's curve
MAX_MACHINES = 8  # with a curve of their own
MAX_BYTES_PER_SECOND = 1.25e9  # of one machine; what states more would squeeze all others
TIMELINES = ("rate", "machines", "sent", "received", "staleness")  # curves over time


def load_history(run: Run) -> dict[str, list[list[float]]]:
    """Load a run's curves.

    Training losses, learning rates and gradient norms are medians over people of each one's mean,
    in bins of tokens; validation losses are medians over people, as in lists of runs and on the
    model's card. "clock" says when the training losses were measured. The curves over time are sums
    over machines of each one's mean, over at least one and a half report intervals, so that every
    machine that is alive is in every sum; "staleness" is a mean over machines. A machine that
    changed mirrors has rows of both, and counts once in every sum.

    Returns:
        "train", "validation": [[tokens, nats per token], …]; "learning_rate", "gradient_norm":
        [[tokens, value], …]; "clock": [[tokens, seconds since 1970], …]; and [[seconds since 1970,
        value], …] of "rate" (tokens/s), "machines" (that report), "sent" and "received" (bytes/s)
        and "staleness" (updates that a machine's peers have and it lacks).
    """
    train = _load_training_losses(run)
    return {
        "train": [[tokens, loss] for tokens, loss, *_ in train],
        "validation": _thin_losses(load_validation_losses(run)),
        "clock": [[tokens, at] for tokens, _, at, _, _ in train],
        "learning_rate": [[tokens, rate] for tokens, _, _, rate, _ in train if rate is not None],
        "gradient_norm": [[tokens, norm] for tokens, *_, norm in train if norm is not None],
        **_load_timelines(run),
    }


def load_validation_losses(run: Run) -> list[tuple[int, float]]:
    """Load the validation losses as (ledger tokens, nats per token): the medians over people.

    A person has one value at a position, however many machines report it, and of two people the
    higher one counts: nobody makes weights look better than others measure them.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH person AS (
                SELECT p.tokens, owner_id, avg(loss) AS loss FROM telemetry_losspoint p
                JOIN fleet_membership m ON m.id = membership_id
                JOIN accounts_machine a ON a.id = m.machine_id
                WHERE m.run_id = %s AND kind = 'validation' AND p.tokens <= %s
                GROUP BY p.tokens, owner_id
            )
            SELECT tokens, percentile_disc(0.5) WITHIN GROUP (ORDER BY loss DESC)
            FROM person GROUP BY tokens ORDER BY tokens
            """,
            [run.pk, run.max_plausible_tokens],
        )
        return [(tokens, loss) for tokens, loss in cursor.fetchall()]


def _thin_losses(losses: list[tuple[int, float]]) -> list[list[float]]:
    """Return at most `MAX_POINTS` points, means of equal sections; `losses` is ascending."""
    width = max(1, math.ceil((losses[-1][0] + 1) / MAX_POINTS)) if losses else 1
    points: list[list[float]] = []
    for _, section in itertools.groupby(losses, key=lambda point: point[0] // width):
        tokens, values = zip(*section, strict=True)
        points.append([round(statistics.fmean(tokens)), round(statistics.fmean(values), 5)])
    return points


def load_machine_curves(run: Run) -> list[dict[str, Any]]:
    """Load the training losses and speeds of the machines that trained most, these first.

    Returns:
        For each {"id", "name", "points": [[tokens, nats per token], …], "rates": [[seconds since
        1970, tokens per second], …]}.
    """
    plausible = Membership.everywhere.filter(run=run, tokens__lte=run.max_plausible_tokens)
    trained = plausible.values("machine").annotate(most=Max("tokens"))
    most = [row["machine"] for row in trained.order_by("-most", "machine")[:MAX_MACHINES]]
    machines, points = Machine.objects.in_bulk(most), {machine: [] for machine in most}
    with connection.cursor() as cursor:
        rows = (
            "telemetry_losspoint p JOIN fleet_membership m ON m.id = membership_id "
            "WHERE m.run_id = %s AND m.machine_id = ANY(%s) AND kind = 'train' AND p.tokens <= %s"
        )
        wanted = [run.pk, most, run.max_plausible_tokens]
        cursor.execute(f"SELECT max(p.tokens) FROM {rows}", wanted)
        width = max(1, math.ceil(((_first_value(cursor) or 0) + 1) / MAX_MACHINE_POINTS))
        means = (
            f"SELECT machine_id, avg(p.tokens), avg(loss) FROM {rows} "
            "GROUP BY machine_id, p.tokens / %s ORDER BY 2"
        )
        cursor.execute(means, [*wanted, width])
        for machine, tokens, loss in cursor.fetchall():
            points[machine].append([round(float(tokens)), round(loss, 5)])
    rates = _machine_rates(run, most)
    return [
        {"id": str(m), "name": machines[m].name, "points": points[m], "rates": rates[m]}
        for m in most
        if points[m] or rates[m]
    ]


def _first_value(cursor: Any) -> Any:
    """Return the value of a statement that always returns one row."""
    return cursor.fetchone()[0]


_MEMBERS = "membership_id IN (SELECT id FROM fleet_membership WHERE run_id = %s)"


def _load_training_losses(
    run: Run,
) -> list[tuple[int, float, float, float | None, float | None]]:
    """Return (tokens, nats per token, seconds since 1970, learning rate, gradient norm).

    Each is the median over people of their means in a bin of tokens; of two people it is the mean.
    """
    middle = "percentile_cont(0.5) WITHIN GROUP (ORDER BY {0})".format
    with connection.cursor() as cursor:
        points = f"telemetry_losspoint WHERE {_MEMBERS} AND kind = 'train' AND tokens <= %s"
        wanted = [run.pk, run.max_plausible_tokens]
        cursor.execute(f"SELECT max(tokens) FROM {points}", wanted)
        most = _first_value(cursor)
        width = max(1, math.ceil(((most or 0) + 1) / MAX_POINTS))
        cursor.execute(
            f"""
            WITH person AS (
                SELECT p.tokens / %s AS bin, owner_id, avg(p.tokens) AS tokens, avg(loss) AS loss,
                    avg(at) AS at, avg(learning_rate) AS rate, avg(gradient_norm) AS norm
                FROM telemetry_losspoint p JOIN fleet_membership m ON m.id = membership_id
                JOIN accounts_machine a ON a.id = m.machine_id
                WHERE m.run_id = %s AND kind = 'train' AND p.tokens <= %s
                GROUP BY bin, owner_id
            )
            SELECT avg(tokens), {middle("loss")}, {middle("at")}, {middle("rate")}, {middle("norm")}
            FROM person GROUP BY bin ORDER BY 1
            """,
            [width, *wanted],
        )
        return [
            (
                round(float(tokens)),
                round(loss, 5),
                round(at, 1),
                _round_significant(rate),
                _round_significant(norm),
            )
            for tokens, loss, at, rate, norm in cursor.fetchall()
        ]


def _round_significant(value: float | None) -> float | None:
    """Round to five significant digits: a learning rate may be small."""
    return None if value is None else float(f"{value:.5g}")


@dataclass(frozen=True)
class _Slots:
    """How rollups become points of curves over time, in seconds."""

    width: int  # of the rollups that are read
    narrow: int  # over which a machine's reports become a mean
    wide: int  # between two points


def _find_slots(run: Run) -> _Slots | None:
    """Return the slots that cover a run's rollups with at most MAX_POINTS; None without rollups."""
    longest = Membership.everywhere.filter(run=run).aggregate(most=Max("report_interval"))["most"]
    interval = max(run.report_every, longest or 0.0)
    narrow = (
        math.ceil(max(1.0, 1.5 * interval / BUCKET_SECONDS)) * BUCKET_SECONDS
        if interval > 5
        else BUCKET_SECONDS
    )
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT width, min(bucket), max(bucket) FROM telemetry_rollup "
            f"WHERE {_MEMBERS} GROUP BY width",
            [run.pk],
        )
        ranges = {width: (first, last) for width, first, last in cursor.fetchall()}
    if not ranges:
        return None
    width, first, last = _find_finest(ranges)
    narrow = math.ceil(narrow / width) * width
    wide = narrow * max(1, math.ceil((last - first + 1) / narrow / (MAX_POINTS - 1)))
    return _Slots(width, narrow, wide)


def _load_timelines(run: Run) -> dict[str, list[list[float]]]:
    """Return the curves over time, by the names in TIMELINES."""
    slots = _find_slots(run)
    curves: dict[str, list[list[float]]] = {name: [] for name in TIMELINES}
    if slots is None:
        return curves
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH machine AS (
                SELECT bucket / %s AS slot, a.owner_id = %s AS is_owner, a.owner_id,
                    sum(rate_sum) / sum(reports) AS rate,
                    least(sum(r.peer_bytes_sent), %s) AS sent,
                    least(sum(r.peer_bytes_received), %s) AS received,
                    sum(lag_sum)::float8 / sum(reports) AS lag
                FROM telemetry_rollup r JOIN fleet_membership m ON m.id = membership_id
                JOIN accounts_machine a ON a.id = m.machine_id
                WHERE m.run_id = %s AND width = %s GROUP BY slot, a.owner_id, m.machine_id
            ), person AS (
                SELECT slot, sum(sent) AS sent, sum(received) AS received, sum(lag) AS lag,
                    count(*) AS machines,
                    CASE WHEN is_owner THEN sum(rate) ELSE least(sum(rate), %s) END AS rate
                FROM machine GROUP BY slot, owner_id, is_owner
            ), everybody AS (
                SELECT slot * %s AS second, sum(rate) AS rate, sum(machines) AS machines,
                    sum(sent) / %s AS sent, sum(received) / %s AS received,
                    sum(lag) / sum(machines) AS lag
                FROM person GROUP BY slot
            )
            SELECT second / %s * %s AS at, avg(rate), avg(machines), avg(sent), avg(received),
                avg(lag)
            FROM everybody GROUP BY at ORDER BY at
            """,
            [
                *(slots.narrow, run.owner_id),
                *[MAX_BYTES_PER_SECOND * slots.narrow] * 2,
                *(run.pk, slots.width, volunteer_rate(run)),
                *[slots.narrow] * 3,
                *[slots.wide] * 2,
            ],
        )
        for at, *values in cursor.fetchall():
            for name, value in zip(TIMELINES, values, strict=True):
                curves[name].append([at, round(float(value), 2)])
    return curves


def _machine_rates(run: Run, machines: list[UUID]) -> dict[UUID, list[list[float]]]:
    """Return machine → [[seconds since 1970, tokens per second], …] in the slots of "rate"."""
    rates: dict[UUID, list[list[float]]] = {machine: [] for machine in machines}
    slots = _find_slots(run)
    if slots is None:
        return rates
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH machine AS (
                SELECT machine_id, bucket / %s * %s AS second, sum(rate_sum) / sum(reports) AS rate
                FROM telemetry_rollup JOIN fleet_membership m ON m.id = membership_id
                WHERE m.run_id = %s AND m.machine_id = ANY(%s) AND width = %s
                GROUP BY machine_id, second
            )
            SELECT machine_id, second / %s * %s AS at, avg(rate) FROM machine
            GROUP BY machine_id, at ORDER BY at
            """,
            [
                *[slots.narrow] * 2,
                *(run.pk, machines, slots.width),
                *[slots.wide] * 2,
            ],
        )
        for machine, at, rate in cursor.fetchall():
            rates[machine].append([at, round(rate, 2)])
    return rates


def _find_finest(ranges: dict[int, tuple[int, int]]) -> tuple[int, int, int]:
    """Return (width, first, last) of the finest rollups that go back to the beginning."""
    beginning = min(first for first, _ in ranges.values())
    for width in BUCKET_WIDTHS:
        if width in ranges and ranges[width][0] < beginning + max(BUCKET_WIDTHS):
            return width, *ranges[width]
    widest = max(ranges)
    return widest, *ranges[widest]
