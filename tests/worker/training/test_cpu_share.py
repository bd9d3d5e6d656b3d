"""Test that a worker computes for a share of the time, whatever its parts take."""

import pytest

from barnraise.training.cpu_share import CpuShare


class Clock:
    """A clock that sleeping and working move."""

    now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("percentage", [10, 50, 90])
@pytest.mark.parametrize("part", [0.01, 0.3, 5.0])
def test_share_of_the_time_is_what_the_owner_wants(percentage, part):
    clock = Clock()
    share = CpuShare(lambda: percentage, lambda: clock.now, clock.sleep)
    slept = 0.0
    for _ in range(20):
        share.start_step()
        for _ in range(10):
            clock.now += part
            share.rest(lambda: False)
        slept += share.slept_in_step
    worked = 200 * part
    assert worked / (worked + slept) == pytest.approx(percentage / 100, abs=0.05)
    assert clock.now - 100 == pytest.approx(worked + slept)


@pytest.mark.parametrize("percentage", [None, 100])
def test_whole_time_is_never_slept(percentage):
    clock = Clock()
    share = CpuShare(lambda: percentage, lambda: clock.now, clock.sleep)
    clock.now += 10
    share.rest(lambda: False)
    assert clock.now == 110 and share.slept_in_step == 0


def test_worker_that_is_to_stop_sleeps_no_longer():
    clock = Clock()
    share = CpuShare(lambda: 1, lambda: clock.now, clock.sleep)
    clock.now += 10
    share.rest(lambda: clock.now > 111)
    assert clock.now < 112
