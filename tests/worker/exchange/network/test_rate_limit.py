"""Token buckets, fair sharing and meters."""

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
def test_token_bucket_allows_at_most_burst_plus_rate(rate, burst, requests):
    bucket = TokenBucket(rate, burst)
    now = consumed = 0.0
    for pause, amount in requests:
        now += pause
        now += bucket.consume(amount, now)
        consumed += amount
        assert consumed <= (burst + rate * now) * (1 + 1e-9) + 1e-6


def test_idle_token_bucket_fills_to_its_burst():
    bucket = TokenBucket(10.0, 20.0)
    assert bucket.consume(20.0, 0.0) == 0.0
    assert bucket.consume(5.0, 0.0) == 0.5
    assert bucket.consume(20.0, 1000.0) == 0.0 and bucket.consume(10.0, 1000.0) == 1.0
    assert TokenBucket(math.inf, 0.0).consume(1e12, 0.0) == 0.0


async def test_fair_share_serves_waiting_senders_alternately():
    share, served = FairShare(100_000.0), []

    async def sender(name: str, size: int) -> None:
        for _ in range(4):
            await share.wait_for_turn(size)
            served.append(name)

    started_at = asyncio.get_running_loop().time()
    await asyncio.gather(sender("a", 2000), sender("b", 2000), sender("c", 2000))
    assert served[:3] in (["a", "b", "c"], ["b", "a", "c"])
    assert sorted(served[3:6]) == ["a", "b", "c"]
    assert asyncio.get_running_loop().time() - started_at > 0.9 * 12 * 2000 / 100_000


async def test_fair_share_without_a_limit_never_waits():
    share = FairShare()
    async with asyncio.timeout(1):
        for _ in range(1000):
            await share.wait_for_turn(1 << 30)


def test_meter_averages_over_its_window():
    meter = Meter()
    assert meter.rate == 0.0
    for tenth in range(1000):
        meter.update(100 * tenth, tenth / 10)
    assert meter.rate == pytest.approx(1000, rel=0.1)
    for tenth in range(1000, 1000 + int(20 * METER_WINDOW)):
        meter.update(100_000, tenth / 10)
    assert meter.rate == 0.0


async def test_fair_share_measures_capacity_only_while_sending():
    share = FairShare()

    async def sender() -> None:
        for _ in range(10):
            with share.measure_sending(10_000):
                await asyncio.sleep(0.02)

    assert share.measured_rate == 0.0
    await asyncio.gather(sender(), sender())
    assert 0.5e6 < share.measured_rate < 1.1e6, "two senders share the capacity"
    before = share.measured_rate
    await asyncio.sleep(0.3)
    assert share.measured_rate == before
