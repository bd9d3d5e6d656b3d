"""What a delta contains, and that it turns one snapshot into the next."""

from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.live.run_snapshot import MAX_DELTA_POINTS, RunSnapshot, build_delta


def test_build_delta_contains_only_what_changed():
    before = RunSnapshot(
        10.0, {"tokens": 1, "status": "training", "rate": 5.0}, {"a": {"id": "a", "step": 1}}
    )
    after = RunSnapshot(
        11.0,
        {**before.run, "tokens": 2},
        {"a": {"id": "a", "step": 2}, "b": {"id": "b", "step": 0}},
    )
    assert build_delta(before, after, []) == {
        "type": "delta",
        "now": 11.0,
        "run": {"tokens": 2},
        "workers": [{"id": "b", "step": 0}],
        "worker_changes": [{"id": "a", "step": 2}],
    }
    assert build_delta(None, after, [])["run"] == after.run
    assert build_delta(before, before, []) == {"type": "delta", "now": 10.0}
    assert build_delta(after, replace(before, run=after.run), [])["removed_workers"] == ["b"]


def apply_worker_parts(rows: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """Apply what a delta says of machines to the rows that a page shows, as the page does."""
    rows = {name: row for name, row in rows.items() if name not in delta.get("removed_workers", [])}
    for row in delta.get("workers", []):
        rows[row["id"]] = row
    for changes in delta.get("worker_changes", []):
        row = rows[changes["id"]]
        changed = row | changes
        if row["exchange"] and changes.get("exchange"):
            changed["exchange"] = row["exchange"] | changes["exchange"]
        rows[changes["id"]] = changed
    return rows


few = st.integers(0, 2)
exchanges = st.none() | st.fixed_dictionaries({"lag": few, "sent_rate": few})
worker_rows = st.dictionaries(
    st.sampled_from("abc"), st.fixed_dictionaries({"step": few, "rate": few, "exchange": exchanges})
).map(lambda rows: {name: {"id": name, **row} for name, row in rows.items()})


@given(before=worker_rows, after=worker_rows)
def test_delta_turns_the_rows_before_it_into_those_after(before, after):
    delta = build_delta(
        RunSnapshot(1.0, {}, before), RunSnapshot(2.0, {"rate": 0.0, "status": "draft"}, after), []
    )
    assert apply_worker_parts(before, delta) == after
    assert apply_worker_parts(after, delta) == after, "applying it once more changes nothing"
    for changes in delta.get("worker_changes", []):
        row = before[changes["id"]]
        assert all(row[name] != value for name, value in changes.items() if name != "id")


@given(count=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_delta_merges_the_points_of_many_machines_into_a_few(count, seed):
    random = Random(seed)
    points: list[dict[str, Any]] = [
        {"kind": "train", "tokens": 100 * n, "loss": random.uniform(2, 9), "at": 50.0 + n}
        for n in range(count)
    ]
    validations = [{**point, "kind": "validation"} for point in points]
    snapshot = RunSnapshot(1.0, {"rate": 0.0, "status": "draft"}, {})
    delta = build_delta(None, snapshot, points + validations)
    assert [tokens for tokens, _ in delta["validation"]] == [point["tokens"] for point in points]
    train, clock = delta["train"], delta["clock"]
    assert len(train) == min(count, MAX_DELTA_POINTS) and train[-1][0] == points[-1]["tokens"]
    assert clock == [[tokens, 50.0 + tokens / 100] for tokens, _ in train]
    ends = [round(tokens / 100) + 1 for tokens, _ in train]
    for start, end, (_, loss) in zip([0, *ends], ends, train, strict=False):
        assert loss == pytest.approx(fmean(p["loss"] for p in points[start:end]), rel=1e-5)
