"""A run's history from Postgres, thinned to what a chart can show."""

import math
from typing import Any

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


def load_history(run: Run) -> dict[str, list[list[float]]]:
    """Load a run's curves.

    Losses are means over all machines, in bins of ledger tokens; "clock" says when the training
    losses were measured. "rate" is the sum over machines of each one's mean, over at least one and
    a half report intervals, so that every machine that is alive is in every sum. A machine that
    changed mirrors has rows of both: its losses then weigh twice in a mean, but it counts once in
    every sum of rates.

    Returns:
        {"train": [[ledger tokens, nats per token], …], "validation": […], "clock": [[ledger tokens,
        seconds since 1970], …], "rate": [[seconds since 1970, tokens per second], …]}.
    """
    train, validation = _losses(run, "train"), _losses(run, "validation")
    return {
        "train": [[tokens, loss] for tokens, loss, _ in train],
        "validation": [[tokens, loss] for tokens, loss, _ in validation],
        "clock": [[tokens, at] for tokens, _, at in train],
        "rate": _rates(run),
    }


def load_machine_curves(run: Run) -> list[dict[str, Any]]:
    """Load the training losses of the machines that trained most, these first.

    Returns:
        For each {"id", "name", "points": [[ledger tokens, nats per token], …]}.
    """
    trained = Membership.everywhere.filter(run=run).values("machine").annotate(most=Max("tokens"))
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
    return [
        {"id": str(m), "name": machines[m].name, "points": points[m]} for m in most if points[m]
    ]


def _first_value(cursor: Any) -> Any:
    """Return the value of a statement that always returns one row."""
    return cursor.fetchone()[0]


_MEMBERS = "membership_id IN (SELECT id FROM fleet_membership WHERE run_id = %s)"


def _losses(run: Run, kind: str) -> list[tuple[int, float, float]]:
    """Return (ledger tokens, nats per token, seconds since 1970), each a mean."""
    with connection.cursor() as cursor:
        points = f"telemetry_losspoint WHERE {_MEMBERS} AND kind = %s AND tokens <= %s"
        wanted = [run.pk, kind, run.max_plausible_tokens]
        cursor.execute(f"SELECT max(tokens) FROM {points}", wanted)
        most = _first_value(cursor)
        width = max(1, math.ceil(((most or 0) + 1) / MAX_POINTS))
        means = (
            f"SELECT avg(tokens), avg(loss), avg(at) FROM {points} GROUP BY tokens / %s ORDER BY 1"
        )
        cursor.execute(means, [*wanted, width])
        return [
            (round(float(tokens)), round(loss, 5), round(at, 1))
            for tokens, loss, at in cursor.fetchall()
        ]


def _rates(run: Run) -> list[list[float]]:
    narrow = (
        math.ceil(max(1.0, 1.5 * run.report_every / BUCKET_SECONDS)) * BUCKET_SECONDS
        if run.report_every > 5
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
            return []
        width, first, last = _finest(ranges)
        narrow = math.ceil(narrow / width) * width
        wide = narrow * max(1, math.ceil((last - first + 1) / narrow / (MAX_POINTS - 1)))
        cursor.execute(
            """
            WITH machine AS (
                SELECT bucket / %s AS slot, a.owner_id = %s AS is_owner, a.owner_id,
                    sum(rate_sum) / sum(reports) AS rate
                FROM telemetry_rollup JOIN fleet_membership m ON m.id = membership_id
                JOIN accounts_machine a ON a.id = m.machine_id
                WHERE m.run_id = %s AND width = %s GROUP BY slot, a.owner_id, m.machine_id
            ), person AS (
                SELECT slot, CASE WHEN is_owner THEN sum(rate) ELSE least(sum(rate), %s) END AS rate
                FROM machine GROUP BY slot, owner_id, is_owner
            ), everybody AS (
                SELECT slot * %s AS second, sum(rate) AS rate FROM person GROUP BY slot
            )
            SELECT second / %s * %s AS at, avg(rate) FROM everybody GROUP BY at ORDER BY at
            """,
            [narrow, run.owner_id, run.pk, width, volunteer_rate(run), narrow, wide, wide],
        )
        return [[at, round(rate, 2)] for at, rate in cursor.fetchall()]


def _finest(ranges: dict[int, tuple[int, int]]) -> tuple[int, int, int]:
    """Return (width, first, last) of the finest rollups that go back to the beginning."""
    beginning = min(first for first, _ in ranges.values())
    for width in BUCKET_WIDTHS:
        if width in ranges and ranges[width][0] < beginning + max(BUCKET_WIDTHS):
            return width, *ranges[width]
    widest = max(ranges)
    return widest, *ranges[widest]
