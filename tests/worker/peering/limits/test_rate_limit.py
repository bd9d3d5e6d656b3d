"""Token buckets, fair sharing and meters."""

import asyncio
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.peering.limits.rate_limit import (
    METER_SECONDS,
    MIN_WAIT_SECONDS,
    PIECE_BYTES,
    PIECE_LIMITS,
    TURN_SECONDS,
    FairShare,
    Meter,
    TokenBucket,
    UplinkSender,
)
from barnraise.peering.limits.service_limits import Rate


@given(
    st.floats(1, 1e6),
    st.floats(1, 1e6),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1e6)), max_size=50),
)
def test_token_bucket_allows_at_most_burst_plus_rate(rate, burst, requests):
    bucket = TokenBucket(Rate(rate, burst))
    now = consumed = 0.0
    for pause, amount in requests:
        now += pause
        now += bucket.consume(amount, now)
        consumed += amount
        assert consumed <= (burst + rate * now) * (1 + 1e-9) + 1e-6


def test_idle_token_bucket_fills_to_its_burst():
    bucket = TokenBucket(Rate(10.0, 20.0))
    assert bucket.consume(20.0, 0.0) == 0.0
    assert bucket.consume(5.0, 0.0) == 0.5
    assert bucket.consume(20.0, 1000.0) == 0.0 and bucket.consume(10.0, 1000.0) == 1.0
    assert TokenBucket(Rate(math.inf, 0.0)).consume(1e12, 0.0) == 0.0


async def send_frames(share: FairShare, name: str, frames: list[int], sent: list[str]) -> None:
    """Send frames, urgent ones if the name is a capital letter."""
    sender = UplinkSender(share)
    if name.isupper():
        sender.start_transfer(share.next_rank())
    for size in frames:
        await sender.wait_for_turn(size)
        sent.append(name)
        await asyncio.sleep(0)  # the channel takes it
    sender.end_transfer()


async def test_fair_share_sends_short_transfers_one_after_another():
    share, sent = FairShare(100_000.0), []
    started_at = asyncio.get_running_loop().time()
    await asyncio.gather(*(send_frames(share, name, [500, 2000, 2000], sent) for name in "abc"))
    assert "".join(sent) == "aaabbbccc", "the first peer has its update before the last begins"
    assert asyncio.get_running_loop().time() - started_at > 0.75 * 3 * 4500 / 100_000


async def test_fair_share_alternates_between_long_transfers():
    share, sent = FairShare(100_000.0), []
    turn = 100_000 * TURN_SECONDS
    frames = [int(turn / 5)] * 10
    await asyncio.gather(*(send_frames(share, name, frames, sent) for name in "ab"))
    assert "".join(sent) == "aaaaabbbbbaaaaabbbbb", "no request of one peer starves the others"


async def test_urgent_transfers_go_one_after_the_other_without_a_limit():
    share, sent = FairShare(), []
    await asyncio.gather(*(send_frames(share, name, [4000] * 3, sent) for name in "XYZ"))
    assert "".join(sent) == "XXXYYYZZZ", "the first peer has its update before the last begins"


async def test_urgent_senders_go_first_one_after_the_other():
    share, sent = FairShare(100_000.0), []
    flood = asyncio.gather(*(send_frames(share, name, [4000] * 9, sent) for name in "ab"))
    while not sent:
        await asyncio.sleep(0.001)
    await asyncio.gather(*(send_frames(share, name, [4000] * 3, sent) for name in "XY"))
    assert "".join(sent).strip("ab") == "XXXYYY"
    await flood
    assert sent.count("a") == sent.count("b") == 9


async def test_sender_whose_peer_does_not_read_loses_its_turn():
    share, sent = FairShare(1_000_000.0), []
    slow = UplinkSender(share)
    await slow.wait_for_turn(1000)  # and never the next one: its frame is not read
    async with asyncio.timeout(60):
        await send_frames(share, "a", [1000] * 3, sent)
    assert sent == ["a"] * 3 and not slow.keeps_turn


async def test_sender_that_ends_while_waiting_leaves_no_turn_behind():
    share, sent = FairShare(100_000.0), []
    ended = asyncio.create_task(send_frames(share, "ended", [20_000] * 9, sent))
    while not sent:
        await asyncio.sleep(0.001)
    ended.cancel()
    async with asyncio.timeout(60):
        await send_frames(share, "a", [1000] * 3, sent)
    assert sent[-3:] == ["a"] * 3


async def test_fair_share_without_a_limit_never_waits():
    sender = UplinkSender(FairShare())
    async with asyncio.timeout(1):
        for _ in range(1000):
            await sender.wait_for_turn(1 << 30)


def test_meter_averages_over_its_window():
    meter = Meter()
    assert meter.rate == 0.0
    for tenth in range(1000):
        meter.update(100 * tenth, tenth / 10)
    assert meter.rate == pytest.approx(1000, rel=0.1)
    for tenth in range(1000, 1000 + int(20 * METER_SECONDS)):
        meter.update(100_000, tenth / 10)
    assert meter.rate == 0.0


async def test_fair_share_measures_capacity_only_while_sending(monkeypatch):
    share = FairShare()
    now = 5.0  # of the event loop, whose own clock runs on while other programs compute
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)

    assert share.measured_rate == 0.0
    for _ in range(10):
        with share.measure_sending(10_000):
            now += 0.01
            with share.measure_sending(10_000):
                now += 0.01
        now += 0.3  # nobody sends
    assert share.measured_rate == pytest.approx(1e6), "two senders share the capacity"


async def test_messages_take_from_what_waits_for_the_uplink():
    share, sent = FairShare(100_000.0), []
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    share.record_message(30_000)
    share.record_message(20_000)
    await send_frames(share, "a", [1000], sent)
    assert loop.time() - started_at >= 0.5 - MIN_WAIT_SECONDS, (
        "the messages' bytes have gone out first"
    )


async def test_messages_on_an_unlimited_uplink_delay_nothing():
    share, sent = FairShare(), []
    share.record_message(10**12)
    async with asyncio.timeout(5):
        await send_frames(share, "a", [1000] * 3, sent)
    assert sent == ["a"] * 3


@given(st.floats(1.0, 1e10))
def test_piece_of_a_limited_uplink_is_waited_for_and_queued_whole(rate):
    """A message waits behind one piece, and a router loses what its queue cannot hold."""
    piece, limits = FairShare(rate).piece_bytes, PIECE_LIMITS
    assert piece <= max(limits.least, rate * limits.seconds) and piece <= PIECE_BYTES
    assert piece <= max(limits.queued, rate * limits.queue_seconds)
    assert piece >= min(limits.queued, int(rate * limits.seconds)), "headers would take more"
    assert FairShare().piece_bytes == PIECE_BYTES


def test_rate_of_zero_is_no_rate():
    for attempt in (lambda: TokenBucket(Rate(0.0, 1.0)), lambda: FairShare().limit(0.0)):
        with pytest.raises(AssertionError):
            attempt()
