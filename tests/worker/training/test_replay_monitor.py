"""Test when a new machine stops waiting for the updates since the run's start."""

from barnraise.training.replay_monitor import REPLAY_SECONDS, ReplayMonitor

TARGET = {"a": 2, "b": 1}


def test_machine_waits_until_it_has_every_update():
    monitor = ReplayMonitor(TARGET, now=0.0)
    assert not monitor.observe({}, 1.0) and not monitor.observe({"a": 2}, 2.0)
    assert not monitor.observe({"a": 1, "b": 5}, 3.0), "each author counts"
    assert monitor.observe({"a": 2, "b": 1, "c": 9}, 4.0)
    assert ReplayMonitor({}, 0.0).observe({}, 0.0)


def test_machine_that_receives_nothing_waits_a_minute_longer():
    monitor = ReplayMonitor(TARGET, now=0.0)
    assert not monitor.observe({"a": 1}, REPLAY_SECONDS - 1)
    assert not monitor.observe({"a": 1}, 2 * REPLAY_SECONDS - 2), "an update has come meanwhile"
    assert monitor.observe({"a": 1}, 2 * REPLAY_SECONDS)
