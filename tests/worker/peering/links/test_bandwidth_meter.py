"""A line is measured in a few steps, whatever its speed, within bounds on bytes and time."""

import pytest

from barnraise.peering.links.bandwidth_meter import (
    FIRST_BYTES,
    MAX_SECONDS,
    PART_BYTES,
    LineMeter,
    StepMeter,
)

MOST = 2_000_000


@pytest.mark.parametrize("rate", [1e3, 3e4, 1.25e5, 2e6, 12.5e6, 1e9])
def test_line_of_any_speed_is_measured_within_the_bounds(rate):
    line, now = LineMeter(MOST), 0.0
    while size := line.next_step():
        began_at, meter, left = now, StepMeter(), size
        while left > 0:
            part = min(left, PART_BYTES)
            left -= part
            now += part / rate
            meter.on_part(part, now)
        line.on_step(size, meter, now - began_at)
    assert line.rate == pytest.approx(rate, rel=0.05)
    assert line.sent <= MOST
    assert line.elapsed <= MAX_SECONDS + FIRST_BYTES / rate
    assert (line.sent > FIRST_BYTES) == (rate > 1e5)


def test_line_without_bytes_or_time_has_no_infinite_rate():
    line = LineMeter(MOST)
    line.on_step(FIRST_BYTES, StepMeter(), 0.0)
    assert line.rate == 0.0
    at_once = StepMeter()
    for _ in range(3):
        at_once.on_part(1000, 5.0)
    line.on_step(FIRST_BYTES, at_once, 0.0)
    assert 0 < line.rate < 1e9
