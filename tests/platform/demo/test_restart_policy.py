"""Test when a process that ended is started again, with a clock of the test's own."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.demo.restart_policy import (
    FIRST_DELAY_SECONDS,
    MAX_FAILURES,
    WINDOW_SECONDS,
    RestartPolicy,
)

PAUSES = st.lists(st.floats(0, 2 * WINDOW_SECONDS), max_size=30)


def failures_within_window(times: list[float]) -> int:
    """Count the failures of the window that ends with the last one."""
    return sum(times[-1] - at < WINDOW_SECONDS for at in times)


@given(pauses=PAUSES)
def test_fifth_failure_within_a_minute_is_the_last(pauses):
    policy = RestartPolicy()
    now = 1000.0
    times = []
    for pause in pauses:
        now += pause
        times.append(now)
        count = failures_within_window(times)
        delay = policy.record_failure(now)
        if count >= MAX_FAILURES:
            assert delay is None
            return
        assert delay == FIRST_DELAY_SECONDS * 2 ** (count - 1)


def test_delays_double_and_start_again_after_a_quiet_minute():
    policy = RestartPolicy()
    assert [policy.record_failure(at) for at in (0, 1, 2, 3)] == [0.2, 0.4, 0.8, 1.6]
    assert policy.record_failure(3 + WINDOW_SECONDS) == 0.2


def test_rare_failures_are_never_given_up():
    policy = RestartPolicy()
    period = WINDOW_SECONDS / (MAX_FAILURES - 1)
    assert None not in [policy.record_failure(n * period) for n in range(200)]
