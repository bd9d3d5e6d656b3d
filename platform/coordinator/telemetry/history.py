"""A run's past from Postgres, thinned to what a chart can show."""

import math

from django.db import connection

from coordinator.runs.models import Run
from coordinator.telemetry.models import BUCKET, WIDTHS

SERIES = 600  # points at most


def history(run: Run) -> dict[str, list[list[float]]]:
    """{"train": [[ledger tokens, nats a token]…], "validation": […], "rate": [[seconds since 1970, tokens/s]…]}.

    Losses are means over all machines, binned by ledger tokens. The rate is the sum over machines of each one's mean,
    over at least one and a half report intervals, so that every machine that is there is in every sum.
    """
    return {"train": _losses(run, "train"), "validation": _losses(run, "validation"), "rate": _rates(run)}


_MEMBERS = "membership_id IN (SELECT id FROM fleet_membership WHERE run_id = %s)"


def _losses(run: Run, kind: str) -> list[list[float]]:
    with connection.cursor() as cursor:
        points = f"telemetry_point WHERE {_MEMBERS} AND kind = %s AND tokens <= %s"
        wanted = [run.pk, kind, run.most_tokens]
        cursor.execute(f"SELECT max(tokens) FROM {points}", wanted)
        most = cursor.fetchone()[0]
        width = max(1, math.ceil(((most or 0) + 1) / SERIES))
        cursor.execute(f"SELECT avg(tokens), avg(loss) FROM {points} GROUP BY tokens / %s ORDER BY 1", [*wanted, width])
        return [[round(float(tokens)), round(loss, 5)] for tokens, loss in cursor.fetchall()]


def _rates(run: Run) -> list[list[float]]:
    narrow = math.ceil(max(1.0, 1.5 * run.report_every / BUCKET)) * BUCKET if run.report_every > 5 else BUCKET
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT width, min(bucket), max(bucket) FROM telemetry_rollup WHERE {_MEMBERS} GROUP BY width", [run.pk]
        )
        ranges = {width: (first, last) for width, first, last in cursor.fetchall()}
        if not ranges:
            return []
        width, first, last = _finest(ranges)
        narrow = math.ceil(narrow / width) * width
        wide = narrow * max(1, math.ceil((last - first + 1) / narrow / (SERIES - 1)))
        cursor.execute(
            f"""
            WITH machine AS (
                SELECT bucket / %s AS slot, sum(rate_sum) / sum(reports) AS rate FROM telemetry_rollup
                WHERE {_MEMBERS} AND width = %s GROUP BY slot, membership_id
            ), everybody AS (SELECT slot * %s AS second, sum(rate) AS rate FROM machine GROUP BY slot)
            SELECT second / %s * %s AS at, avg(rate) FROM everybody GROUP BY at ORDER BY at
            """,
            [narrow, run.pk, width, narrow, wide, wide],
        )
        return [[at, round(rate, 2)] for at, rate in cursor.fetchall()]


def _finest(ranges: dict[int, tuple[int, int]]) -> tuple[int, int, int]:
    """(width, first, last) of the finest rows that still go back to the beginning."""
    beginning = min(first for first, _ in ranges.values())
    for width in WIDTHS:
        if width in ranges and ranges[width][0] < beginning + max(WIDTHS):
            return width, *ranges[width]
    widest = max(ranges)
    return widest, *ranges[widest]
