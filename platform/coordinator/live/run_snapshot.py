"""What watchers of a run see: snapshots, and the deltas between them.

    snapshot  everything, with the number of the last delta that it includes
    delta     what changed since the previous delta: changed values of the run, changed fields of
              machines, whole rows of new ones, machines that are no longer shown, changed plans,
              new points, new events

Values are absolute, and plans and points are keyed, so a delta that is applied to a snapshot which
already includes it changes nothing.
"""

import itertools
import json
import statistics
import time
import zlib
from dataclasses import dataclass, field
from typing import Any, cast

from django.conf import settings
from django.core.cache import cache

from coordinator.lib.valkey import valkey_client
from coordinator.live.activity_feed import collect_activity
from coordinator.live.live_messages import LiveMachine
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue, run_table
from coordinator.telemetry.history import load_history

COLUMNS = tuple(LiveMachine.model_fields)  # of a machine's row
TIMELINE_SECONDS = 5  # between two live points of the curves over time
HISTORY_SECONDS = 2  # a run's history is read at most this often, however many pages open at once
MAX_ROWS = 200  # machines in a snapshot, so that watchers of a large run do not receive thousands
STORED_SECONDS = 600  # the last snapshot is stored this long; of a quieter run it is built again
MAX_LIVE_POINTS = 500  # searched for those that PostgreSQL does not hold yet
MAX_DELTA_POINTS = 5  # of one curve in a delta; a chart is not wide enough for more each second


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment.

    Attributes:
        now: Seconds since 1970.
        run: The run's values.
        workers: The rows of its machines by id; of many machines, those that report come first.
        plans: The plans of those machines that have one, by id. They are apart from the rows
            because a row changes with every report and a plan rarely.
        events: The activity feed by event id, the newest event first.
        timelines: The values of the curves over time now, by the names in `TIMELINES`.
    """

    now: float
    run: dict[str, Any]
    workers: dict[str, dict[str, Any]]
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    timelines: dict[str, float] = field(default_factory=dict)

    @classmethod
    def capture(cls, run: Run) -> "RunSnapshot":
        """Read the run's state from the database and from Valkey."""
        now = time.time()
        all_rows = run_table.machine_rows(run, now)
        counted = run_table.counted_rows(all_rows)
        rows = sorted(counted, key=_row_order)[:MAX_ROWS]
        activity = collect_activity(run, counted)
        summary = run_table.run_summary(run, all_rows) | {"event_count": activity.total}
        return cls(
            now=now,
            run={name: _round_floats(value) for name, value in summary.items()},
            workers={
                row["id"]: {name: _round_floats(row[name]) for name in COLUMNS} for row in rows
            },
            plans={row["id"]: row["plan"] for row in rows if row["plan"]},
            events={event["id"]: event for event in activity.events},
            timelines={"rate": summary["rate"], **run_table.sum_traffic(counted)},
        )

    def to_message(self, number: int) -> dict[str, Any]:
        """Return the message of a snapshot up to delta `number`, without the run's history."""
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
    """Name Valkey's key for the number of the last delta."""
    return f"live:{run}:seq"


def lock_key(run: object) -> str:
    """Name Valkey's key that exists while a process broadcasts the run."""
    return f"live:{run}:broadcaster"


def _snapshot_key(run: object) -> str:
    return f"live:{run}:snapshot"


def build_snapshot(run: Run) -> dict[str, Any]:
    """Build a snapshot message from the run's current state.

    The number is read first: the state that is read afterwards includes all deltas up to it.
    """
    number = int(cast(str, valkey_client().get(sequence_key(run.pk)) or 0))
    return RunSnapshot.capture(run).to_message(number) | _history_with_live_points(run)


def store_snapshot(run: object, snapshot: RunSnapshot, number: int) -> None:
    """Store a snapshot for the requests of all processes.

    Call it *before* the delta of this number is sent: a watcher that subscribes too late for that
    delta then finds it in every snapshot that it can fetch.
    """
    text = json.dumps(snapshot.to_message(number), separators=(",", ":"))
    cache.set(_snapshot_key(run), zlib.compress(text.encode(), 1), STORED_SECONDS)


def load_snapshot(run: Run) -> dict[str, Any] | None:
    """Return the snapshot message that was stored with the last delta, if there is one.

    It is current only while a process broadcasts the run.
    """
    packed = cache.get(_snapshot_key(run.pk))
    if not packed:
        return None
    return json.loads(zlib.decompress(packed)) | _history_with_live_points(run)


def build_delta(
    before: RunSnapshot | None, after: RunSnapshot, points: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what changed between two snapshots, without the delta's number.

    Args:
        before: The earlier snapshot; None makes everything count as changed.
        after: The later snapshot.
        points: Points that were measured in between.
    """
    before = before or RunSnapshot(0.0, {}, {})
    parts: dict[str, Any] = {
        "run": _changed_values(before.run, after.run),
        "workers": [row for machine, row in after.workers.items() if machine not in before.workers],
        "worker_changes": [
            _machine_changes(before.workers[machine], row)
            for machine, row in after.workers.items()
            if before.workers.get(machine, row) != row
        ],
        "removed_workers": [machine for machine in before.workers if machine not in after.workers],
        "plans": {
            machine: plan
            for machine, plan in after.plans.items()
            if before.plans.get(machine) != plan
        },
        "events": [event for name, event in after.events.items() if name not in before.events],
        **_merge_dense_series(_token_series(points)),
        **_timeline_points(before, after),
    }
    return {
        "type": "delta",
        "now": after.now,
        **{name: part for name, part in parts.items() if part},
    }


def _changed_values(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return those values of `after` that `before` lacks or that differ there."""
    return {
        name: value for name, value in after.items() if name not in before or before[name] != value
    }


def _machine_changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return a machine's id and the changed fields of its row, of its exchange those inside."""
    changes = {"id": after["id"], **_changed_values(before, after)}
    if changes.get("exchange") and before.get("exchange"):
        changes["exchange"] = _changed_values(before["exchange"], after["exchange"])
    return changes


def _token_series(points: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the curves over tokens that measured points make."""
    training = [point for point in points if point["kind"] == "train"]
    validation = [point for point in points if point["kind"] == "validation"]
    return {
        "train": mean_series(training, "loss"),
        "validation": mean_series(validation, "loss"),
        "clock": token_clock(points),
        "learning_rate": mean_series(training, "learning_rate"),
        "gradient_norm": mean_series(training, "gradient_norm"),
    }


def mean_series(points: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Return [[tokens, mean value]…], ascending; points without the value are left out.

    Points of several machines at the same number of tokens become one.
    """
    values: dict[int, list[float]] = {}
    for point in points:
        if point.get(name) is not None:
            values.setdefault(point["tokens"], []).append(point[name])
    return [[tokens, _mean(those)] for tokens, those in sorted(values.items())]


def token_clock(points: list[dict[str, Any]]) -> list[list[float]]:
    """Return [[ledger tokens, seconds since 1970]…], ascending: when training reached them."""
    times = {point["tokens"]: round(point["at"], 1) for point in points if point["kind"] == "train"}
    return [[tokens, at] for tokens, at in sorted(times.items())]


def _merge_dense_series(series: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Merge neighbours in curves to which every report adds points: at most MAX_DELTA_POINTS each.

    A merged point has the tokens of the last one, and the mean value or, of the clock, the last
    time. The page merges the points of a long curve in the same way. Validation losses stay as they
    are: they are rare, and the page shows the last one as a figure.
    """
    return {
        name: curve if name == "validation" else _merge_points(curve, select_last=name == "clock")
        for name, curve in series.items()
    }


def _merge_points(points: list[list[float]], select_last: bool) -> list[list[float]]:
    count = min(len(points), MAX_DELTA_POINTS)
    edges = [len(points) * number // count for number in range(count + 1)] if count else []
    sections = [points[start:end] for start, end in itertools.pairwise(edges)]
    return [
        section[-1] if select_last else [section[-1][0], _mean([value for _, value in section])]
        for section in sections
    ]


def _mean(values: list[float]) -> float:
    """Return the mean to six significant digits; a chart shows fewer."""
    return float(f"{statistics.fmean(values):.6g}")


def _history_with_live_points(run: Run) -> dict[str, list[list[float]]]:
    """Return the series from PostgreSQL, extended by live points that are not there yet."""
    key = f"live:{run.pk}:history"
    stored = cache.get(key)
    if stored is None:
        stored = load_history(run)
        cache.set(key, stored, HISTORY_SECONDS)
    stream = valkey_client().xrevrange(report_queue.points_key(run.pk), count=MAX_LIVE_POINTS)
    entries = cast(list[tuple[str, dict[str, str]]], stream)
    points = [json.loads(fields["point"]) for _, fields in reversed(entries)]
    for name, series in _token_series(points).items():
        last = stored[name][-1][0] if stored[name] else -1
        stored[name] = stored[name] + [point for point in series if point[0] > last]
    return stored


def _timeline_points(before: RunSnapshot, after: RunSnapshot) -> dict[str, list[list[float]]]:
    """Return [[seconds since 1970, value]] of each curve over time if points are due."""
    slot = after.now // TIMELINE_SECONDS * TIMELINE_SECONDS
    is_running = bool(after.run["rate"]) or after.run["status"] == "training"
    if before.now >= slot or not is_running:
        return {}
    return {name: [[slot, _round_floats(value)]] for name, value in after.timelines.items()}


def _row_order(row: dict[str, Any]) -> tuple[bool, str, str, str]:
    """Sort machines that report first, then in the order of the page."""
    return not row["alive"], row["person"], row["name"], row["id"]


def _round_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _round_floats(item) for name, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value
