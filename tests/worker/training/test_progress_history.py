"""Test how a worker estimates the run's speed and thins the course of its loss."""

import pytest

from barnraise.training.progress_history import MAX_LOSSES, ProgressHistory


def test_speed_is_that_of_the_ledger_over_the_last_minutes():
    history = ProgressHistory()
    assert history.tokens_per_second is None
    for second in range(0, 10):
        history.record(float(second), 1000 * second, None, is_training=True)
    assert history.tokens_per_second is None, "updates come in bursts"
    for second in range(10, 400):
        history.record(float(second), 500 * second, None, is_training=True)
    assert history.tokens_per_second == pytest.approx(500)


def test_pause_does_not_count_as_slow_training():
    history = ProgressHistory()
    for second in range(0, 60):
        history.record(float(second), 1000 * second, None, is_training=True)
    history.record(1000.0, 60_000, None, is_training=False)
    assert history.tokens_per_second is None
    for second in range(1000, 1060):
        history.record(float(second), 1000 * second, None, is_training=True)
    assert history.tokens_per_second == pytest.approx(1000)


def test_losses_keep_their_course_in_bounded_space():
    history = ProgressHistory()
    for step in range(10_000):
        history.record(float(step), step, 10_000.0 - step, is_training=True)
    losses = history.losses
    assert MAX_LOSSES // 2 <= len(losses) <= MAX_LOSSES
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 9_800 and losses[-1] < 400
