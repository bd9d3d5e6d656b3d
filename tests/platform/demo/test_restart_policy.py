"""Test when a process that ended is started again, with a clock of the test's own."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.demo import restart_policy

PAUSES = st.lists(st.floats(0, 2 * restart_policy.WINDOW_SECONDS), max_size=30)


def failures_within_window(times: list[float]) -> int:
    """Count the failures of the window that ends with the last one."""
    return sum(times[-1] - at < restart_policy.WINDOW_SECONDS for at in times)


@given(pauses=PAUSES)
def test_fifth_failure_within_a_minute_is_the_last(pauses):
    policy = restart_policy.RestartPolicy()
    now = 1000.0
    times = []
    for pause in pauses:
        now += pause
        times.append(now)
        count = failures_within_window(times)
        delay = policy.record_failure(now)
        if count >= restart_policy.MAX_FAILURES:
            assert delay is None
            return
        assert delay == restart_policy.FIRST_DELAY_SECONDS * 2 ** (count - 1)
