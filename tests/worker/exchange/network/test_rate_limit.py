"""Buckets, turns and meters."""

import asyncio
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.exchange.network.rate_limit import METER_WINDOW, FairShare, Meter, TokenBucket


@given(
    st.floats(1, 1e6),
    st.floats(1, 1e6),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1e6)), max_size=50),
)
def test_who_waits_as_long_as_a_bucket_says_never_takes_more_than_its_burst_and_its_rate(
    rate, burst, takes
):
    bucket, now, taken, largest = TokenBucket(rate, burst), 0.0, 0.0, 0.0
    for pause, amount in takes:
        now += pause
        now += bucket.consume(amount, now)
        taken, largest = taken + amount, max(largest, amount)
        assert taken <= (burst + rate * now) * (1 + 1e-9) + 1e-6


def test_a_bucket_that_was_left_alone_is_full_and_no_fuller():
    bucket = TokenBucket(10.0, 20.0)
    assert bucket.consume(20.0, 0.0) == 0.0
    assert bucket.consume(5.0, 0.0) == 0.5
    assert bucket.consume(20.0, 1000.0) == 0.0 and bucket.consume(10.0, 1000.0) == 1.0
    assert TokenBucket(math.inf, 0.0).consume(1e12, 0.0) == 0.0


async def test_who_waits_for_a_capped_line_is_served_by_turns():
    turns, served = FairShare(100_000.0), []

    async def sender(name: str, size: int) -> None:
        for _ in range(4):
            await turns.wait_for_turn(size)
            served.append(name)

    began = asyncio.get_running_loop().time()
    await asyncio.gather(sender("a", 2000), sender("b", 2000), sender("c", 2000))
    assert served[:3] in (["a", "b", "c"], ["b", "a", "c"]) and sorted(served[3:6]) == [
        "a",
        "b",
        "c",
    ]
    assert asyncio.get_running_loop().time() - began > 0.9 * 12 * 2000 / 100_000


async def test_a_line_without_a_cap_is_nobodys_to_wait_for():
    turns = FairShare()
    async with asyncio.timeout(1):
        for _ in range(1000):
            await turns.wait_for_turn(1 << 30)


def test_a_meter_tells_the_bytes_a_second_of_the_last_while():
    meter = Meter()
    assert meter.rate == 0.0
    for tenth in range(1000):
        meter.update(100 * tenth, tenth / 10)
    assert meter.rate == pytest.approx(1000, rel=0.1)
    for tenth in range(1000, 1000 + int(20 * METER_WINDOW)):
        meter.update(100_000, tenth / 10)
    assert meter.rate == 0.0


async def test_what_a_line_carries_is_measured_while_somebody_sends_and_no_longer():
    turns = FairShare()

    async def sender() -> None:
        for _ in range(10):
            with turns.measure_sending(10_000):
                await asyncio.sleep(0.02)

    assert turns.measured_rate == 0.0
    await asyncio.gather(sender(), sender())
    assert 0.5e6 < turns.measured_rate < 1.1e6, "two at a time share it"
    before = turns.measured_rate
    await asyncio.sleep(0.3)
    assert turns.measured_rate == before
