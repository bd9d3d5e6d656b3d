"""Reports on their way: a durable queue in Valkey, and live copies of the newest for whoever watches.

    reports:pending        list: what machines posted and Postgres does not hold yet, oldest first
    live:{run}:workers     hash: machine id → its newest numbers, as JSON
    live:{run}:points      stream: the newest measured losses; its ids are cursors

Losing all of Valkey loses nothing for good: a machine keeps every report until Postgres holds it, and posts it again.
"""

import json
import secrets
import time
from collections.abc import Sequence
from functools import lru_cache

from redis.commands.core import Script

from barnraise.protocol.coordinator_messages import Attestation
from barnraise.protocol.reports import Report
from coordinator.fleet.models import Membership
from coordinator.lib.valkey import valkey_client

PENDING_KEY = "reports:pending"
MAX_PENDING = 20_000  # entries; past this the site is too far behind to take more
MAX_LIVE_POINTS = 5_000  # a run
READ = 16  # runs whose rows a process keeps as it read them last
LIVE_TTL_SECONDS = 7 * 86_400  # live copies of a run nobody reports from any more


def workers_key(run: object) -> str:
    return f"live:{run}:workers"


def points_key(run: object) -> str:
    return f"live:{run}:points"


class QueueFullError(Exception):
    """The queue is full: whatever drains it does not run."""


def queue_reports(
    membership: Membership, reports: list[Report], witnessed: Sequence[Attestation] = ()
) -> None:
    """Queues what Postgres does not hold, and shows it to watchers. `reports` ascend by seq, and the testimonies were
    checked. Raises Behind."""
    fresh = [r for r in reports if r.seq > membership.mark]
    if not fresh:
        return
    now, run, most = time.time(), membership.run_id, membership.run.max_plausible_tokens
    machine, newest = str(membership.machine_id), fresh[-1]
    entry = {
        "id": secrets.token_hex(8),
        "membership": str(membership.pk),
        "received": now,
        "reports": [r.model_dump(mode="json") for r in fresh],
        "attestations": [told.model_dump(mode="json") for told in witnessed],
    }
    points = [
        {"machine": machine, **point.model_dump(), "at": min(report.at, now)}
        for report in fresh
        for point in report.points
        if point.tokens <= most
    ]
    told = [json.dumps(each) for each in (entry, _row(newest, now), *points)]
    keys = [PENDING_KEY, workers_key(run), points_key(run)]
    if not _ingest_script()(
        keys, [MAX_PENDING, LIVE_TTL_SECONDS, MAX_LIVE_POINTS, machine, newest.seq, *told]
    ):
        raise QueueFullError


@lru_cache(maxsize=1)
def _ingest_script() -> Script:
    return valkey_client().register_script(_INGEST_LUA)


# One trip for a post: whether the queue has room, the entry, the machine's row unless a newer one is shown, its points.
_INGEST_LUA = """
local most, seconds, kept, machine, seq = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if redis.call('llen', KEYS[1]) >= tonumber(most) then return 0 end
redis.call('rpush', KEYS[1], ARGV[6])
local shown = redis.call('hget', KEYS[2], machine)
if not shown or cjson.decode(shown)['seq'] < tonumber(seq) then redis.call('hset', KEYS[2], machine, ARGV[7]) end
for n = 8, #ARGV do redis.call('xadd', KEYS[3], 'MAXLEN', '~', kept, '*', 'point', ARGV[n]) end
redis.call('expire', KEYS[2], seconds)
redis.call('expire', KEYS[3], seconds)
return 1
"""


def publish_point(run: object, machine: object, point: dict) -> None:
    """One {kind, tokens, loss, at} that another mirror tells of, to watchers here."""
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


def _row(report: Report, now: float) -> dict:
    """What of a report the table of workers shows."""
    kept = ("seq", "activity", "version", "tokens", "ledger_tokens", "rate", "step", "updates_sent", "updates_received",
            "peers", "vector", "anchor")  # fmt: skip
    told = {"plan", "step_seconds"} if report.plan else set()  # without one, what is stored stands
    told |= {"exchange"} if report.exchange else set()
    return {**report.model_dump(mode="json", include=told.union(kept)), "last_seen": now}


_read: dict[
    str, dict[str, tuple[str, dict]]
] = {}  # run → machine → its row as it came, and what it says


def live_rows(run: object) -> dict[str, dict]:
    """Machine id → its newest live numbers, which nobody may change: a run of thousands is looked at once a second, and
    only what changed since is read anew."""
    told, before = valkey_client().hgetall(workers_key(run)), _read.pop(str(run), {})
    now = {
        machine: kept
        if (kept := before.get(machine)) and kept[0] == row
        else (row, json.loads(row))
        for machine, row in told.items()
    }
    for oldest in list(_read)[: max(0, len(_read) - READ + 1)]:
        _read.pop(oldest, None)
    _read[str(run)] = now
    return {machine: row for machine, (_, row) in now.items()}


def newest_report_number(run: object, machine: object) -> int:
    """The number of a machine's newest report; 0 before the first, or once Valkey has forgotten."""
    row = valkey_client().hget(workers_key(run), str(machine))
    return json.loads(row)["seq"] if row else 0


def points_cursor(run: object) -> str:
    """Where the stream of points ends now."""
    last = valkey_client().xrevrange(points_key(run), count=1)
    return last[0][0] if last else "0-0"


def points_since(run: object, after: str, most: int = 2000) -> tuple[list[dict], str]:
    """Points past a cursor, oldest first, each {machine, kind, tokens, loss, at}; and the cursor past them."""
    found = valkey_client().xrange(points_key(run), min=f"({after}", count=most)
    return [json.loads(fields["point"]) for _, fields in found], found[-1][0] if found else after
