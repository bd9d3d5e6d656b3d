"""Test the decision whether a machine may train: its rules, its pauses, and that it never flaps."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning.limits import Limits
from barnraise.protocol.enums import PauseReason
from barnraise.training.limits.decision import (
    CPU_MARGIN,
    HEAT_MARGIN,
    HOLD_SECONDS,
    TRAIN,
    Facts,
    TrainingDecision,
    decide,
    format_until,
)

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 11, 25, 12, 0, tzinfo=BERLIN)  # a Wednesday
ALL_RULES = Limits(
    hours="mon-fri 11:00-13:00, sat-sun",
    idle=2,
    busy_cpu=50,
    pause_for=("blender",),
    max_temperature=85,
    month_up=1000,
)
RESTING = Facts(idle_seconds=1e6, other_cpu=0.0, celsius=40.0)


def test_machine_without_rules_trains():
    assert decide(Limits(on_battery=True), Facts(on_battery=True), NOON) == TRAIN


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"on_battery": True}, PauseReason.BATTERY, "paused: on battery"),
        ({"idle_seconds": 5.0}, PauseReason.IN_USE, "paused: somebody uses it"),
        ({"idle_seconds": None}, PauseReason.IN_USE, "paused: whether somebody uses it cannot be"),
        ({"other_cpu": 63.2}, PauseReason.BUSY, "paused: other programs use 63 % of the CPU"),
        ({"programs": ("blender",)}, PauseReason.PROGRAM, "paused: blender is running"),
        ({"celsius": 85.0}, PauseReason.HOT, "paused: 85 °C are too hot"),
        ({"celsius": None}, PauseReason.HOT, "paused: its temperature cannot be read"),
        ({"month_sent": 1000}, PauseReason.TRAFFIC, "paused until Tue 00:00: this month's"),
    ],
)
def test_each_rule_pauses_with_its_reason(changes, kind, reason):
    assert decide(ALL_RULES, RESTING, NOON) == TRAIN
    decision = decide(ALL_RULES, replace(RESTING, **changes), NOON)
    assert not decision.may_train and decision.kind is kind
    assert decision.reason.startswith(reason)
    assert decision.until is not None and decision.until >= NOON.timestamp() + HOLD_SECONDS
    assert decision.is_offline == (kind is PauseReason.TRAFFIC)


def test_hours_name_the_time_at_which_they_come():
    evening = NOON.replace(hour=13)
    decision = decide(ALL_RULES, RESTING, evening)
    assert decision.reason == "paused until Thu 11:00 by its hours"
    assert decision.until == datetime(2026, 11, 26, 11, tzinfo=BERLIN).timestamp()
    morning = decide(ALL_RULES, RESTING, NOON.replace(hour=8))
    assert morning.reason == "paused until 11:00 by its hours"


def test_month_of_uploads_ends_with_the_month_of_this_zone():
    december = datetime(2026, 12, 31, 23, 59, tzinfo=BERLIN)
    until = decide(Limits(month_up=1), Facts(month_sent=1), december).until
    assert until == datetime(2027, 1, 1, tzinfo=BERLIN).timestamp()


def test_busy_and_hot_machines_must_be_well_below_their_limits():
    for kind, low, field in (
        (PauseReason.BUSY, 50 - CPU_MARGIN, "other_cpu"),
        (PauseReason.HOT, 85 - HEAT_MARGIN, "celsius"),
    ):
        paused = TrainingDecision(kind, "paused", NOON.timestamp() - 1)
        just_above = replace(RESTING, last=paused, **{field: low + 0.1})
        assert decide(ALL_RULES, just_above, NOON).kind is kind
        assert decide(ALL_RULES, replace(just_above, last=TRAIN), NOON) == TRAIN
        assert decide(ALL_RULES, replace(RESTING, last=paused, **{field: low - 0.1}), NOON) == TRAIN


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (NOON.replace(hour=19), "19:00"),
        (NOON + timedelta(days=1), "Thu 12:00"),
        (NOON + timedelta(days=9), "4 Dec 12:00"),
    ],
)
def test_moments_are_written_as_people_say_them(moment, text):
    assert format_until(moment.timestamp(), NOON) == text


facts = st.builds(
    Facts,
    idle_seconds=st.one_of(st.none(), st.floats(0, 400)),
    on_battery=st.booleans(),
    other_cpu=st.one_of(st.none(), st.floats(0, 100)),
    programs=st.sampled_from([(), ("blender",)]),
    celsius=st.one_of(st.none(), st.floats(20, 100)),
    month_sent=st.integers(0, 1200),
)
rules = st.builds(
    Limits,
    hours=st.sampled_from(["", "sat-sun", "12:01-12:03", "mon-fri 19:00-12:02, wed 12:05-13:00"]),
    idle=st.sampled_from([None, 1, 3]),
    on_battery=st.booleans(),
    busy_cpu=st.sampled_from([None, 5, 50]),
    pause_for=st.sampled_from([(), ("blender",)]),
    max_temperature=st.sampled_from([None, 60]),
    month_up=st.sampled_from([None, 600]),
)
# Facts as they are read in the course of some minutes, each some seconds after the one before.
courses = st.lists(st.tuples(facts, st.sampled_from([2, 2, 2, 30, 59, 61])), max_size=60)
starts = st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31))


def follow(limits: Limits, course, start: datetime) -> list[tuple[float, TrainingDecision]]:
    """Return what is decided at each moment of a course of facts."""
    now, last = start.replace(tzinfo=UTC), TRAIN
    decisions = []
    for found, seconds in course:
        last = decide(limits, replace(found, last=last), now.astimezone(BERLIN))
        decisions.append((now.timestamp(), last))
        now += timedelta(seconds=seconds)
    return decisions


@settings(max_examples=200, deadline=None)
@given(rules, courses, starts)
def test_pause_never_ends_before_its_until(limits, course, start):
    until = 0.0
    for now, decision in follow(limits, course, start):
        assert now >= until or not decision.may_train
        assert decision.may_train == (decision.until is None) == (decision.kind is None)
        assert decision.may_train == (not decision.reason)
        if decision.until is not None:
            assert decision.until > now
            until = max(until, decision.until)


@settings(max_examples=200, deadline=None)
@given(rules, courses, starts)
def test_no_order_of_facts_oscillates_faster_than_once_a_minute(limits, course, start):
    limits = replace(limits, hours="")  # hours may be as short as somebody wants them
    was_training, pauses = True, []
    for now, decision in follow(limits, course, start):
        if was_training and not decision.may_train:
            pauses.append(now)
        was_training = decision.may_train
    assert all(later - earlier >= HOLD_SECONDS for earlier, later in pairwise(pauses))


@settings(max_examples=100, deadline=None)
@given(rules, facts, starts)
def test_decision_is_a_function_of_its_arguments(limits, found, start):
    now = start.replace(tzinfo=UTC).astimezone(BERLIN)
    assert decide(limits, found, now) == decide(limits, found, now)
