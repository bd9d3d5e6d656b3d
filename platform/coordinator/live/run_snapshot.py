"""What watchers of a run are shown, and the difference between two moments of it.

    snapshot  everything, with the number of the last delta it includes
    delta     what changed since the delta before: the run's changed values, whole rows of changed workers, which are
              shown no more, changed plans, new points, new events

Values are absolute, plans and points are keyed, so applying a delta to a snapshot that already includes it changes
nothing.
"""

import json
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.core.cache import cache

from coordinator.lib.valkey import valkey_client
from coordinator.live.activity_feed import collect_activity
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue, run_table
from coordinator.telemetry.history import history

COLUMNS = ("id", "name", "person", "activity", "alive", "last_seen", "version", "tokens", "rate", "step",
           "step_seconds", "updates_sent", "updates_received", "peers", "behind", "exchange",
           "agrees")  # fmt: skip
RATE_EVERY = 5  # seconds between two live points of tokens/s
HISTORY_SECONDS = 2  # a run's past is read at most this often, however many pages open at once
MAX_ROWS = 200  # machines in a picture, as the page shows them: of thousands, each watcher would be told of each
PICTURE_SECONDS = (
    600  # that the last one is kept; of a run that is quiet for longer it is taken anew
)
NEWEST = 500  # live points that a snapshot looks through for those that Postgres does not hold yet


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment. `now` in seconds since 1970; `workers`, of many those alive before the others, and the
    `plans` of those that have one, by machine id: apart, because a row changes with every report and a plan hardly
    ever; `events` by id, the newest first."""

    now: float
    run: dict[str, Any]
    workers: dict[str, dict[str, Any]]
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def capture(cls, run: Run) -> "RunSnapshot":
        now = time.time()
        everybody = run_table.workers(run, now)
        rows = sorted(everybody, key=_place)[:MAX_ROWS]
        shown = {row["id"]: {name: _short(row[name]) for name in COLUMNS} for row in rows}
        line = {name: _short(value) for name, value in run_table.summary(run, everybody).items()}
        plans = {row["id"]: row["plan"] for row in rows if row["plan"]}
        return cls(
            now,
            line,
            shown,
            plans,
            {event["id"]: event for event in collect_activity(run, everybody)},
        )

    def to_message(self, number: int) -> dict[str, Any]:
        """As a snapshot shows it, but for the run's past."""
        return {
            "type": "snapshot",
            "seq": number,
            "mirror": settings.MIRROR_NAME,
            "now": self.now,
            "run": self.run,
            "workers": list(self.workers.values()),
            "plans": self.plans,
            "events": list(self.events.values()),
        }


def sequence_key(run: object) -> str:
    return f"live:{run}:seq"


def _picture_key(run: object) -> str:
    return f"live:{run}:picture"


def lock_key(run: object) -> str:
    """There while somebody speaks for the run."""
    return f"live:{run}:broadcaster"


def build_snapshot(run: Run) -> dict[str, Any]:
    """The number is read first: whatever the deltas up to it said is in what is read after."""
    number = int(valkey_client().get(sequence_key(run.pk)) or 0)
    return RunSnapshot.capture(run).to_message(number) | _past(run)


def store_snapshot(run: object, picture: RunSnapshot, number: int) -> None:
    """For the snapshots of every process, *before* the delta of this number is sent: who misses that delta, because it
    came to watch after, then finds it in any snapshot fetched from there on."""
    text = json.dumps(picture.to_message(number), separators=(",", ":"))
    cache.set(_picture_key(run), zlib.compress(text.encode(), 1), PICTURE_SECONDS)


def load_snapshot(run: Run) -> dict[str, Any] | None:
    """A snapshot without looking at the run: as the last delta left it. Only while somebody speaks for it."""
    packed = cache.get(_picture_key(run.pk))
    return json.loads(zlib.decompress(packed)) | _past(run) if packed else None


def build_delta(
    before: RunSnapshot | None, after: RunSnapshot, points: list[dict[str, Any]]
) -> dict[str, Any]:
    """What `after` and the new `points` say beyond `before`; all of it when there is no before. Without its number."""
    before = before or RunSnapshot(0.0, {}, {})
    run, workers, plans = before.run, before.workers, before.plans
    parts: dict[str, Any] = {
        "run": {
            name: value
            for name, value in after.run.items()
            if name not in run or run[name] != value
        },
        "workers": [row for machine, row in after.workers.items() if workers.get(machine) != row],
        "gone": [machine for machine in workers if machine not in after.workers],
        "plans": {
            machine: plan for machine, plan in after.plans.items() if plans.get(machine) != plan
        },
        "events": [event for name, event in after.events.items() if name not in before.events],
        "train": loss_series(points, "train"),
        "validation": loss_series(points, "validation"),
        "clock": token_clock(points),
        "rate": _rate(before, after),
    }
    return {
        "type": "delta",
        "now": after.now,
        **{name: part for name, part in parts.items() if part},
    }


def loss_series(points: list[dict[str, Any]], kind: str) -> list[list[float]]:
    """[[ledger tokens, mean loss]…] ascending: machines that measured at one count are one point."""
    found: dict[int, list[float]] = {}
    for point in points:
        if point["kind"] == kind:
            found.setdefault(point["tokens"], []).append(point["loss"])
    return [
        [tokens, round(sum(losses) / len(losses), 5)] for tokens, losses in sorted(found.items())
    ]


def token_clock(points: list[dict[str, Any]]) -> list[list[float]]:
    """[[ledger tokens, seconds since 1970]…] ascending: when training stood there."""
    found = {point["tokens"]: round(point["at"], 1) for point in points if point["kind"] == "train"}
    return [[tokens, at] for tokens, at in sorted(found.items())]


def _past(run: Run) -> dict[str, list[list[float]]]:
    """What Postgres holds, and past its end what is still on its way there."""
    key = f"live:{run.pk}:history"
    past = cache.get(key)
    if past is None:
        past = history(run)
        cache.set(key, past, HISTORY_SECONDS)
    tail = valkey_client().xrevrange(report_queue.points_key(run.pk), count=NEWEST)
    newest = [json.loads(fields["point"]) for _, fields in reversed(tail)]
    fresh = {kind: loss_series(newest, kind) for kind in ("train", "validation")} | {
        "clock": token_clock(newest)
    }
    for kind, points in fresh.items():
        last = past[kind][-1][0] if past[kind] else -1
        past[kind] = past[kind] + [point for point in points if point[0] > last]
    return past


def _rate(before: RunSnapshot, after: RunSnapshot) -> list[list[float]]:
    slot = after.now // RATE_EVERY * RATE_EVERY
    due = before.now < slot
    return (
        [[slot, after.run["rate"]]]
        if due and (after.run["rate"] or after.run["status"] == "training")
        else []
    )


def _place(row: dict[str, Any]) -> tuple[bool, str, str, str]:
    """Those alive first, then as the page sorts them."""
    return not row["alive"], row["person"], row["name"], row["id"]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value
