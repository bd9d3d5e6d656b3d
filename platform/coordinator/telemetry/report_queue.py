"""Queue reports durably in Valkey, and serve live copies of the newest figures to watchers.

    reports:pending        list: posted reports that Postgres does not hold yet, oldest first
    live:{run}:workers     hash: machine id → its newest figures, as JSON
    live:{run}:points      stream: the newest measured losses; its ids are cursors
    limit:reports:…        what one machine has added in an hour, and in a day, see `cost_of`

Nothing is lost for good if all of Valkey is lost: a machine keeps every report until Postgres holds
it, and posts it again.
"""

import json
import secrets
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from redis.commands.core import Script

from barnraise.protocol.coordinator_messages import Attestation
from barnraise.protocol.reports import Report
from coordinator.fleet.models import Membership
from coordinator.lib.valkey import valkey_client

PENDING_KEY = "reports:pending"
MAX_PENDING = 20_000  # entries; beyond that the site is too far behind to accept more
MAX_LIVE_POINTS = 5_000  # of a run
# What one machine may add to the database, in the units of `cost_of`: many times what a machine
# measures, so that one that comes back after days catches up, and far less than a program can send.
MAX_COSTS = ((3600, 500_000), (86_400, 3_000_000))  # (seconds, cost within them)
REPORT_COST = 4  # rows of rollups, receipts and events
VALIDATION_COST = 100  # validation losses are kept for ever
MAX_CACHED_RUNS = 16  # runs whose parsed rows a process keeps
LIVE_TTL_SECONDS = 7 * 86_400  # of live figures after the last report of a run


def workers_key(run: object) -> str:
    """Return the key of the hash with machines' newest figures."""
    return f"live:{run}:workers"


def points_key(run: object) -> str:
    """Return the key of the stream of losses."""
    return f"live:{run}:points"


class QueueFullError(Exception):
    """The queue is full, because no process drains it, or the machine has sent too much."""


def cost_of(reports: Sequence[Report]) -> int:
    """Return what reports add to the database, in training losses. Pure."""
    points = [point for report in reports for point in report.points]
    validations = sum(point.kind == "validation" for point in points)
    return REPORT_COST * len(reports) + len(points) + VALIDATION_COST * validations


def queue_reports(
    membership: Membership,
    reports: list[Report],
    witnessed: Sequence[Attestation] = (),
    interval: float = 0.0,
) -> None:
    """Queue what Postgres does not hold yet, and show it to watchers.

    Args:
        membership: the machine in its run.
        reports: its reports, in ascending order of their numbers.
        witnessed: its attestations, whose signatures are checked.
        interval: in how many seconds the answer asks for the next report; 0 if it does not.

    Raises:
        QueueFullError: the queue has `MAX_PENDING` entries, or the machine has sent too much.
    """
    fresh = [r for r in reports if r.seq > membership.high_water_mark]
    if not fresh:
        return
    now, run, most = time.time(), membership.run_id, membership.run.max_plausible_tokens
    machine, newest = str(membership.machine_id), fresh[-1]
    entry = {
        "id": secrets.token_hex(8),
        "membership": str(membership.pk),
        "received": now,
        "interval": interval,
        "reports": [r.model_dump(mode="json") for r in fresh],
        "attestations": [attestation.model_dump(mode="json") for attestation in witnessed],
    }
    points = [
        point
        for report in fresh
        for point in _live_points(machine, report, now)
        if point["tokens"] <= most
    ]
    row = _table_row(newest, now) | {"report_interval": interval}
    values = [json.dumps(value) for value in (entry, row, *points)]
    keys = [PENDING_KEY, workers_key(run), points_key(run)]
    keys += [f"limit:reports:{machine}:{s}:{int(now) // s}" for s, _ in MAX_COSTS]
    limits = [bound for limit in MAX_COSTS for bound in limit]
    figures = [MAX_PENDING, LIVE_TTL_SECONDS, MAX_LIVE_POINTS, machine, newest.seq]
    if not _ingest_script()(keys, [*figures, cost_of(fresh), *limits, *values]):
        raise QueueFullError


def last_training_loss(report: Report) -> int | None:
    """Return the index of a report's last training loss, which gets the report's other figures."""
    positions = [i for i, point in enumerate(report.points) if point.kind == "train"]
    return positions[-1] if positions else None


def _live_points(machine: str, report: Report, now: float) -> list[dict[str, Any]]:
    """Return a report's losses as watchers receive them."""
    points = [
        {"machine": machine, **point.model_dump(), "at": min(report.at, now)}
        for point in report.points
    ]
    last = last_training_loss(report)
    if last is not None:
        points[last] |= {
            "learning_rate": report.learning_rate,
            "gradient_norm": report.gradient_norm,
        }
    return points


@lru_cache(maxsize=1)
def _ingest_script() -> Script:
    return valkey_client().register_script(_INGEST_LUA)


# One round trip for a post: check that the queue has room, append the entry, update the machine's
# row unless a newer one is shown, and append its losses.
_INGEST_LUA = """
local most, seconds, kept, machine, seq = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if redis.call('llen', KEYS[1]) >= tonumber(most) then return 0 end
local cost = tonumber(ARGV[6])
for n = 0, 1 do
  local spent = tonumber(redis.call('get', KEYS[4 + n]) or '0')
  if spent > 0 and spent + cost > tonumber(ARGV[8 + 2 * n]) then return 0 end
end
for n = 0, 1 do
  redis.call('incrby', KEYS[4 + n], cost)
  redis.call('expire', KEYS[4 + n], ARGV[7 + 2 * n])
end
redis.call('rpush', KEYS[1], ARGV[11])
local shown = redis.call('hget', KEYS[2], machine)
if not shown or cjson.decode(shown)['seq'] < tonumber(seq) then
  redis.call('hset', KEYS[2], machine, ARGV[12])
end
for n = 13, #ARGV do redis.call('xadd', KEYS[3], 'MAXLEN', '~', kept, '*', 'point', ARGV[n]) end
redis.call('expire', KEYS[2], seconds)
redis.call('expire', KEYS[3], seconds)
return 1
"""


def publish_point(run: object, machine: object, point: dict[str, Any]) -> None:
    """Show a loss, {kind, tokens, loss, at}, to watchers here that another mirror sent."""
    key = points_key(run)
    with valkey_client().pipeline(transaction=False) as pipe:
        pipe.xadd(
            key,
            {"point": json.dumps({"machine": str(machine), **point})},
            maxlen=MAX_LIVE_POINTS,
            approximate=True,
        )
        pipe.expire(key, LIVE_TTL_SECONDS)
        pipe.execute()


def _table_row(report: Report, now: float) -> dict[str, Any]:
    """Select what the machines' table shows of a report."""
    links = [link.model_dump(mode="json") for link in report.links]
    return report.dump_stated() | {"seq": report.seq, "links": links, "last_seen": now}


# run → machine → its row as JSON, and parsed.
_parsed_rows: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {}


def live_rows(run: object) -> dict[str, dict[str, Any]]:
    """Return each machine's newest live figures, by its id; callers must not change them.

    A run of thousands of machines is read once a second, so only rows that changed are parsed
    again.
    """
    texts: Any = valkey_client().hgetall(workers_key(run))
    before = _parsed_rows.pop(str(run), {})
    now = {}
    for machine, text in texts.items():
        cached = before.get(machine)
        is_same = cached is not None and cached[0] == text
        now[machine] = cached if cached and is_same else (text, json.loads(text))
    for oldest in list(_parsed_rows)[: max(0, len(_parsed_rows) - MAX_CACHED_RUNS + 1)]:
        _parsed_rows.pop(oldest, None)
    _parsed_rows[str(run)] = now
    return {machine: row for machine, (_, row) in now.items()}


def cached_run_count() -> int:
    """Return of how many runs the parsed rows are cached in this process."""
    return len(_parsed_rows)


def newest_report_number(run: object, machine: object) -> int:
    """Return the number of a machine's newest report; 0 if Valkey holds none."""
    row = valkey_client().hget(workers_key(run), str(machine))
    return json.loads(row)["seq"] if row else 0


def points_cursor(run: object) -> str:
    """Return the cursor at the end of the stream of losses."""
    last: Any = valkey_client().xrevrange(points_key(run), count=1)
    return last[0][0] if last else "0-0"


def points_since(run: object, after: str, most: int = 2000) -> tuple[list[dict[str, Any]], str]:
    """Read losses past a cursor.

    Returns:
        The losses, oldest first, each {machine, kind, tokens, loss, at}; and the cursor after them.
    """
    entries: Any = valkey_client().xrange(points_key(run), min=f"({after}", count=most)
    return [json.loads(fields["point"]) for _, fields in entries], entries[-1][
        0
    ] if entries else after
