"""A snapshot is fetched from several peers at once, with their bandwidth together."""

import time
from dataclasses import replace

from helpers.wait_for import join_peers, stepping, wait_until

from barnraise.exchange.blobs import blob_fetcher
from barnraise.exchange.weights.peer_estimates import PeerEstimates
from barnraise.ledger.anchor import fragment_to_bytes
from barnraise.planning.fragment_streaming import split_evenly
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.planning.round_limits import RAMP_ROUNDS
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.spec import ModelSpec

# Fifty fragments, 9.7 MB as an anchor.
DEEP = ModelSpec(layers=48, width=64, heads=2, context=32, vocabulary=256)


def start_servers(world, *speeds: float):
    """Return machines that agree on one update, with uplinks limited to bytes per second."""
    world.spec = replace(world.spec, model=DEEP)
    servers = [world.machine(n + 1).start() for n in range(len(speeds))]
    for server in servers[1:]:
        server.add_peers(servers[0])
    servers[0].publish_round(1)
    world.wait_for_agreement(*servers)
    for server, speed in zip(servers, speeds, strict=True):
        world.network.uplinks[server.identity.key] = speed
    return servers


def record_fetch_seconds(machine, monkeypatch) -> list[float]:
    """Return a list that grows by the seconds of each fetch of a snapshot's bytes."""
    fetcher, seconds = machine.exchange.server.fetcher, []
    fetch = fetcher.fetch

    async def timed_fetch(*arguments):
        started_at = time.monotonic()
        result = await fetch(*arguments)
        seconds.append(time.monotonic() - started_at)
        return result

    monkeypatch.setattr(fetcher, "fetch", timed_fetch)
    return seconds


def test_joiner_uses_four_fifths_of_its_sources_bandwidth(world, monkeypatch):
    speeds = (600e3, 400e3, 300e3, 200e3)
    servers, late = start_servers(world, *speeds), world.machine(9)
    seconds = record_fetch_seconds(late, monkeypatch)
    with stepping(*servers):
        snapshot = join_peers(late, *servers, trust_one=True)
    size = sum(4 * fragment.numel() for fragment in snapshot.fragments)
    assert size / seconds[0] >= 0.8 * sum(speeds), (
        f"{size / seconds[0] / sum(speeds):.2f} of the sources' bandwidth"
    )
    world.wait_for_agreement(*servers, late)


def test_fragment_of_a_stalled_source_continues_from_another(world, monkeypatch):
    monkeypatch.setattr(blob_fetcher, "STALL_SECONDS", 2.0)
    servers, late = start_servers(world, 2e6, 2e6), world.machine(9)
    size = sum(4 * fragment.size for fragment in DEEP.fragments())

    def freeze(machine):
        if machine is servers[0] and late.exchange.stats.bytes_received > 0.3 * size:
            world.network.uplinks[machine.identity.key] = 1.0

    with stepping(*servers, then=freeze):
        assert join_peers(late, *servers, trust_one=True) is not None
    assert late.exchange.stats.bytes_received < 1.15 * size


def test_damaged_fragment_of_one_source_is_outvoted_alone(world):
    servers, late = start_servers(world, 5e6, 5e6, 5e6), world.machine(9)
    servers[2].anchor.fragments[7][5] += 1  # bit-rot
    with stepping(*servers):
        snapshot = join_peers(late, *servers, trust_one=True)
    assert bytes(fragment_to_bytes(snapshot.fragments[7])) == bytes(
        fragment_to_bytes(servers[0].anchor.fragments[7])
    )


def test_late_joiners_weight_grows_to_its_full_share(world):
    a, late = world.machine(1).start(), world.machine(2)
    a.exchange.announce_rate(100.0)
    a.publish_round(1)
    with stepping(a):
        join_peers(late, a, trust_one=True)
    wait_until(lambda: late.exchange.server.gossip.links[a.identity.key].rate == 100.0)
    weights = []
    for seed in range(RAMP_ROUNDS + 2):
        weights.append(late.exchange.compute_weight(100.0))
        late.publish_round(10 + seed)
    assert weights == sorted(weights) and weights[0] < 0.15 and weights[-1] == weights[-2] == 0.5
    assert a.exchange.compute_weight(100.0) > 0.4, "the first machine keeps its full weight"


def test_late_joiners_weight_grows_by_rounds_when_streaming(world, monkeypatch):
    a, late = world.machine(1).start(), world.machine(2)
    a.publish_round(1)
    with stepping(a):
        join_peers(late, a, trust_one=True)
    schedule = RoundSchedule(
        10, QuantizationScheme.parse("dense4"), streaming=split_evenly((10, 10), 2)
    )
    monkeypatch.setattr(PeerEstimates, "plan_round", lambda *values: schedule)
    late.exchange.plan_round(100.0)
    weights = []
    for seed in range(4):
        weights.append(late.exchange.compute_weight(100.0))
        late.publish_round(10 + seed)
    assert weights[0] == weights[1] < weights[2] == weights[3]


def test_known_peers_are_found_again_after_a_restart(world):
    a, b = world.start_agreed(1, 2)
    b.stop()
    a.publish_round(2)
    b.open()
    b.start()  # without an introduction
    world.wait_for_agreement(a, b)
    assert b.ledger.peer_store.peers() and b.anchor.vector == {a.exchange.author.name: 2}
