"""What a peer is sent of the updates and blobs that it requests."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until
from hypothesis import given

from barnraise.exchange.updates.update_sender import OVERHEAD_SECONDS, UpdateTraffic
from barnraise.ledger import blob_store
from barnraise.peering.limits.served_pieces import REPEAT_LIMITS
from barnraise.peering.transports.framing import unpack
from barnraise.planning.uplink_budget import MIN_UPDATE_SHARE, UPDATE_SHARE, UplinkUse
from barnraise.protocol.messages import BlobMissing, BlobPart, BlobRequest, UpdateRequest


def test_blob_that_a_crash_left_whole_without_its_name_is_finished(world, monkeypatch):
    """All its bytes are here, so that no byte is left to request."""
    a, b = (world.machine(n).start() for n in (1, 2))
    data = bytes(range(256)) * 1000
    name = a.ledger.blobs.store(data)

    def crash(*arguments: object) -> None:
        raise OSError("the power failed")

    with monkeypatch.context() as patch:
        patch.setattr(blob_store, "move_into_place", crash)
        b.ledger.blobs.append_piece(name, 0, data[:1000], len(data))
        with pytest.raises(OSError, match="power failed"):
            b.ledger.blobs.append_piece(name, 1000, data[1000:], len(data))
    assert b.ledger.blobs.partial_size(name) == len(data) and not b.ledger.blobs.has(name)
    b.add_peers(a)
    wait_until(lambda: b.exchange.stats.peers == 1)
    assert b.exchange.fetch_blobs({name: len(data)}, 20)
    assert b.ledger.blobs.read_verified(name) == data


def test_machines_that_request_all_again_and_again_get_it_once(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    update = a.publish_round(1)
    blob, last = (a.ledger.blobs.store(random.Random(n).randbytes(1 << 20)) for n in (1, 2))
    received = 0
    machines = (8, 9)  # of one volunteer
    for number in machines:
        channels = []
        with connect_raw_peer(world, a, number, reads=False, channels=channels) as send:
            for time in range(60):
                send(UpdateRequest(author=update.author, first=1, last=1))
                send(BlobRequest(digest=blob, offset=time))
            send(BlobRequest(digest=last))
            channel, run = channels[0]

            async def receive_all(channel=channel) -> int:
                size = 0
                while True:
                    message, payload = unpack(await channel.receive())
                    size += len(payload)
                    match message:
                        case BlobMissing(digest=digest) if digest == last:
                            return size
                        case BlobPart(digest=digest) if digest == last:
                            if message.offset + len(payload) == message.total:
                                return size

            received += run(receive_all())
    wanted = sum(part.size for part in update.fragments) + (2 << 20)
    assert wanted <= received / len(machines) <= 1.1 * wanted + REPEAT_LIMITS.bytes
    b.add_peers(a)
    world.wait_for_agreement(a, b)
    assert b.exchange.fetch_blobs({blob: None, last: None}, 20), "somebody else has what it lacks"


def test_nothing_is_measured_before_a_second_update():
    traffic = UpdateTraffic()
    assert traffic.measured() is None and traffic.free_at(UplinkUse(1.0)) == -math.inf
    traffic.on_sent(500, is_own=False)
    traffic.on_published(100, 10.0)
    traffic.on_sent(100, is_own=True)
    assert traffic.measured() is None


@given(
    copies=st.floats(1, 15),
    relayed=st.floats(0, 1e7),
    size=st.integers(1000, 10**8),
    period=st.floats(0.5, 1e4),
)
def test_steady_traffic_is_measured_as_it_is(copies, relayed, size, period):
    traffic = UpdateTraffic()
    for number in range(5):
        traffic.on_published(size, number * period)
        traffic.on_sent(int(copies * size), is_own=True)
        traffic.on_sent(int(relayed * period), is_own=False)
    measured_copies, measured_relayed = traffic.measured()
    assert measured_copies == pytest.approx(copies, rel=0.01)
    assert measured_relayed == pytest.approx(relayed, rel=0.01, abs=3 / period)
    use = UplinkUse(size / UPDATE_SHARE, machines=12)  # a copy takes a second
    sent = max(copies, min(11, copies + relayed * period / size))
    assert traffic.free_at(use) == pytest.approx(4 * period + sent, rel=0.01)


def test_until_it_is_measured_a_line_has_to_send_what_it_receives():
    use = UpdateTraffic().use(1e5, links=10)
    assert use.update_rate == pytest.approx(UPDATE_SHARE * 1e5 / 10)
    assert replace(use, machines=16).update_rate == pytest.approx(UPDATE_SHARE * 1e5 / 15)
    assert UpdateTraffic().use(1e5, 10, carrier=1e9).copies == 1.0
    assert UpdateTraffic().use(math.inf, links=10).update_rate == math.inf


@given(
    line=st.floats(2e4, 2e6),
    overhead=st.floats(0.0, 0.6),
    copies=st.integers(1, 15),
    carrier=st.sampled_from([math.inf, 6e6]),
)
def test_all_bytes_on_the_line_together_fit_its_share(line, overhead, copies, carrier):
    """Messages, acknowledgements and what is sent again take from the updates."""
    traffic, size = UpdateTraffic(), 100_000
    total = 0.0
    for second in range(200):
        if second % 5 == 0:
            traffic.on_published(size, float(second), math.isfinite(carrier))
            traffic.on_sent(copies * size, is_own=True)
            total += copies * size
        total += overhead * line
        traffic.on_line(int(total), float(second))
    use = traffic.use(line, links=15, carrier=carrier)
    assert (copies * use.update_rate + overhead * line) / line <= UPDATE_SHARE + 0.01
    assert use.rate >= MIN_UPDATE_SHARE * line
    if math.isinf(carrier):
        assert use.update_rate > 0.95 * min(UPDATE_SHARE - overhead, UPDATE_SHARE) * line / 15


def test_greetings_of_the_first_seconds_are_spread_over_the_window():
    traffic = UpdateTraffic()
    for second in range(6):
        traffic.on_line(600 * second, float(second))
    overhead = 5 * 600 / OVERHEAD_SECONDS / UPDATE_SHARE
    assert traffic.use(1e5, links=1).rate == pytest.approx(1e5 - overhead)


def test_change_is_measured_within_a_few_updates():
    traffic, measured = UpdateTraffic(), []
    for number in range(20):
        traffic.on_published(1000, float(number))
        traffic.on_sent(1000 * (13 if number < 10 else 1), is_own=True)
        measured.append(traffic.measured() or (13.0, 0.0))
    assert measured[15][0] < 2
    for (before, _), (after, _) in pairwise(measured):
        assert after >= before / 2, "a round is half as long as the one before at least"


def test_carrier_that_comes_or_goes_begins_the_measurement_again():
    traffic = UpdateTraffic()
    for number in range(3):
        traffic.on_published(1000, float(number))
        traffic.on_sent(13_000, is_own=True)
    assert traffic.measured() == (13, 0) and traffic.measured(has_carrier=True) is None
    traffic.on_published(1000, 3.0, has_carrier=True)
    traffic.on_sent(1000, is_own=True)
    assert traffic.measured(has_carrier=True) is None, "the last update had none"
    traffic.on_published(1000, 4.0, has_carrier=True)
    assert traffic.measured(has_carrier=True) == (1, 0) and traffic.measured() is None
