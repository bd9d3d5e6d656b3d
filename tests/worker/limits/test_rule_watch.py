"""Test that a worker obeys the rules in its machine's file now, and never trains without them."""

import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from barnraise.errors import StateError
from barnraise.planning.limits import Limits
from barnraise.planning.weekly_hours import parse_hours
from barnraise.protocol.enums import PauseReason
from barnraise.state_dir import StateDir
from barnraise.training.limits.decision import HOLD_SECONDS, Facts
from barnraise.training.limits.machine_facts import FactsReader
from barnraise.training.limits.monthly_traffic import MonthlyTraffic
from barnraise.training.limits.rule_watch import RuleWatch, local_now


class SetFacts(FactsReader):
    """Facts that a test sets."""

    facts = Facts()

    def read(self, limits: Limits) -> Facts:
        return self.facts


@pytest.fixture
def home(tmp_path):
    return StateDir(tmp_path)


@pytest.fixture
def clock():
    """Return a list with the time, which a test may change."""
    return [datetime(2026, 11, 25, 12, 0, tzinfo=UTC)]


@pytest.fixture
def reader():
    return SetFacts()


@pytest.fixture
def watch(home, reader, clock):
    return RuleWatch(home, reader, lambda: clock[0])


def change_limits(home: StateDir, limits: Limits) -> None:
    """Save limits, whose file has another time than the one before."""
    home.limits = limits
    later = time.time_ns() + 10**9
    os.utime(home.path / "limits.json", ns=(later, later))


def test_rule_that_changes_applies_at_once(home, watch):
    assert watch.refresh().may_train
    change_limits(home, Limits(hours="13:00-14:00", cpu=50))
    assert watch.refresh().reason == "paused until 13:00 by its hours"
    assert watch.limits.cpu == 50
    change_limits(home, Limits())
    assert watch.refresh().may_train, "no pause outlasts the rule that ordered it"


def test_facts_are_remembered_between_two_looks(watch, reader, clock):
    reader.facts = Facts(on_battery=True)
    assert watch.refresh().kind is PauseReason.BATTERY
    reader.facts = Facts()
    clock[0] += timedelta(seconds=HOLD_SECONDS - 1)
    assert watch.refresh().kind is PauseReason.BATTERY
    clock[0] += timedelta(seconds=2)
    assert watch.refresh().may_train


def test_pause_of_a_clock_that_was_ahead_ends_when_it_is_set_back(home, watch, clock):
    home.limits = Limits(hours="12:00-13:00")
    clock[0] += timedelta(days=900, hours=8)
    assert watch.refresh().kind is PauseReason.HOURS
    clock[0] -= timedelta(days=900, hours=8)
    assert watch.refresh().may_train


BROKEN = [
    (b'{"hours": "sat-s', "is damaged or cut short"),
    (b'{"phase_of_the_moon": "full"}', "has the limit 'phase_of_the_moon', which only a newer"),
    (b'{"hours": "fri"}', "'fri' says no time of that day"),
    (b'{"hours": 5}', "is damaged"),
    (b'{"pause_for": [5]}', "is damaged"),
    (b"[]", "is damaged"),
]


@pytest.mark.parametrize(("content", "sentence"), BROKEN)
def test_worker_does_not_train_by_a_file_that_cannot_be_read(
    home, watch, caplog, content, sentence
):
    change_limits(home, Limits(cpu=50))
    watch.refresh()
    (home.path / "limits.json").write_bytes(content)
    with pytest.raises(StateError, match=f"limits.json.*{sentence}"):
        _ = home.limits
    for _ in range(3):
        decision = watch.refresh()
        assert decision.kind is PauseReason.RULES and "cannot be read" in decision.reason
        assert watch.limits == Limits(cpu=50), "the last ones that could be read"
    assert caplog.text.count(sentence) == 1
    change_limits(home, Limits())
    assert watch.refresh().may_train


def test_file_of_another_user_is_refused_by_name(home, monkeypatch):
    home.limits = Limits()
    monkeypatch.setattr(os, "geteuid", lambda: (home.path / "limits.json").stat().st_uid + 1)
    with pytest.raises(StateError, match=r"limits.json belongs to another user"):
        _ = home.limits


def test_month_of_uploads_counts_all_workers_and_restarts(tmp_path):
    first = MonthlyTraffic(tmp_path)
    assert first.record(100, "2026-11") == 100
    assert first.record(130, "2026-11") == 130
    assert not (tmp_path / "traffic.json").exists(), "small amounts are not written at once"
    first.save()
    second = MonthlyTraffic(tmp_path)
    assert second.record(50, "2026-11") == 180
    assert second.record(70, "2026-12") == 20
    (tmp_path / "traffic.json").write_text("{")
    assert MonthlyTraffic(tmp_path).record(7, "2026-12") == 7


def test_used_up_month_pauses_until_the_next_one(home, watch, clock):
    home.limits = Limits(month_up=1000)
    sent = [999]
    watch.count_traffic(lambda: sent[0])
    assert watch.refresh().may_train
    sent[0] = 1000
    decision = watch.refresh()
    assert decision.kind is PauseReason.TRAFFIC and decision.is_offline
    watch.count_traffic(lambda: 0)  # the next worker of the same command
    assert watch.refresh().kind is PauseReason.TRAFFIC
    clock[0] = datetime(2026, 12, 1, 0, 0, tzinfo=UTC)
    assert watch.refresh().may_train


def test_watch_decides_in_a_thread(home, reader):
    watch = RuleWatch(home, reader)
    with watch.running():
        assert watch.decision.may_train
        change_limits(home, replace(Limits(), pause_for=("blender",)))
        reader.facts = Facts(programs=("blender",))
        started = time.monotonic()
        while watch.decision.may_train and time.monotonic() < started + 30:
            time.sleep(0.02)
        assert watch.decision.kind is PauseReason.PROGRAM


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/St_Johns", "UTC"])
def test_machines_own_zone_counts_also_where_its_clock_changes(monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    now = datetime.now(ZoneInfo(zone)).replace(tzinfo=None)
    assert abs(local_now() - now) < timedelta(seconds=60)
    hours = parse_hours("22:00-02:30")
    for day in range(0, 366):
        moment = datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(days=day)
        found = hours.next_change(datetime.fromtimestamp(moment.timestamp()))
        expected = hours.next_change(moment.astimezone(ZoneInfo(zone)))
        assert found is not None and expected is not None
        assert found == expected.replace(tzinfo=None)
        assert found.timestamp() == expected.timestamp()
    monkeypatch.undo()
    local_now()  # the zone of the tests again
