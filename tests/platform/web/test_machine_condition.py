"""A machine's version, limits and speed in words."""

import pytest

from barnraise.protocol.reports import LimitsView, SystemView
from coordinator.web.machine_condition import describe_limits, explain_speed, is_older

PLAN = {"predicted_seconds": 2.0}


@pytest.mark.parametrize(
    ("reported", "newest", "older"),
    [
        ("0.1.0", "0.2.0", True),
        ("0.9.0", "0.10.0", True),
        ("0.2.0+local", "0.2.0", False),
        ("0.2.0", "0.2.0+5.g1a2b3c4", False),
        ("1.0", "0.9.9", False),
        ("from-source", "0.2.0", False),
        ("0.1.0", "", False),
    ],
)
def test_older_version_is_recognised(reported, newest, older):
    assert is_older(reported, newest) is older


def test_limits_are_named_and_unlimited_ones_left_out():
    assert describe_limits(LimitsView(memory=8 * 10**9, uplink=625_000)) == [
        ("Memory", "8 GB"),
        ("Uplink", "625 kB/s"),
    ]
    assert describe_limits(None) == describe_limits(LimitsView()) == []


@pytest.mark.parametrize(
    ("measured", "system", "sentence"),
    [
        (None, None, "No step has been measured yet."),
        (2.1, None, "Steps take as long as planned."),
        (1.0, None, "Steps take 50 % less time than planned."),
        (
            4.0,
            None,
            "Steps take 2.0 times as long as planned: the machine does not report its load.",
        ),
        (
            8.76,
            SystemView(cpu=0.95, worker_cpu=0.35),
            "Steps take 4.4 times as long as planned: other programs take 60 % of this CPU.",
        ),
        (
            4.0,
            SystemView(memory_used=97, memory_total=100, gpu_celsius=90),
            "Steps take 2.0 times as long as planned: its memory is almost full, so the system may"
            " use the disk instead; the GPU is at 90 °C and slows down.",
        ),
        (
            400.0,
            SystemView(cpu=0.5, worker_cpu=0.5),
            "Steps take 200 times as long as planned: its load does not explain it.",
        ),
    ],
)
def test_speed_is_explained_in_a_sentence(measured, system, sentence):
    assert explain_speed(PLAN, measured, system) == sentence
    assert explain_speed(None, 4.0, system) == "No step has been measured yet."


@pytest.mark.parametrize(
    ("measured", "end"),
    [
        (8.0, "its steps took 4.0 times as long as planned."),
        (2.0, "its steps took as long as planned."),
        (1.0, "its steps took 50 % less time than planned."),
    ],
)
def test_speed_of_a_silent_machine_is_past_and_without_reasons(measured, end):
    hot = SystemView(cpu_celsius=95)
    sentence = explain_speed(PLAN, measured, hot, "3 days ago")
    assert sentence == f"When the machine last reported, 3 days ago, {end}"
