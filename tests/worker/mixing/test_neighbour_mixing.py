"""Test decentralised Adam over real channels in memory, against a reference of a few lines."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from helpers.network.memory_transport import MemoryNetwork
from helpers.network.mixing_links import ThreadedLinks
from helpers.wait_for import wait_until

from barnraise.mixing import mesh_links, neighbour_mixing
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.neighbour_mixing import (
    LONELY_MIXINGS,
    PATIENCE,
    MixingSettings,
    NeighbourMixing,
    Patience,
)
from barnraise.mixing.payload_size import payload_size
from barnraise.mixing.payloads import check_weights
from barnraise.peering.limits.back_off import BackOff
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.planning.mixing_topology import ALTERNATING, COMPLETE, EXPONENTIAL, RING
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity

COUNT = 5000  # weights
RATE = 1e-2
TIMEOUT = 120.0
STRANGER = Identity(b"s" * 32).key


class Swarm:
    """Machines with links to each other, each trained by a thread."""

    def __init__(self, machines: int, settings: MixingSettings) -> None:
        self.network = MemoryNetwork()
        self.settings = settings
        self.keys = sorted(Identity(bytes([n + 1]) * 32).key for n in range(machines))
        self.links = {key: self.connect(key) for key in self.keys}
        self.wait_until_connected(self.keys)

    def connect(self, key: str) -> MeshLinks:
        members = [Peer(key=each, addresses=[]) for each in self.keys]
        sizes = payload_size(COUNT, self.settings.bits), payload_size(COUNT, 32)
        links = ThreadedLinks(self.network.transport(key), members, *sizes)
        links.start()
        return links

    def wait_until_connected(self, keys: list[str]) -> None:
        for key in keys:
            others = sorted(set(keys) - {key})
            assert self.links[key].wait_for(
                lambda inbox, others=others: inbox.neighbours == others, TIMEOUT
            )

    def run(self, call: Callable[[int, NeighbourMixing], None], machines=None) -> None:
        """Call `call` with each machine's number and mixing in threads of their own."""
        chosen = range(len(self.keys)) if machines is None else machines
        mixings = {m: NeighbourMixing(self.links[self.keys[m]], self.settings) for m in chosen}
        failures: list[BaseException] = []

        def run_one(machine: int) -> None:
            try:
                call(machine, mixings[machine])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run_one, args=(machine,)) for machine in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a machine waits for ever"
        assert not failures, failures
        self.mixings = mixings

    def close(self) -> None:
        for links in self.links.values():
            links.stop()


@pytest.fixture
def swarm():
    swarms: list[Swarm] = []

    def build(machines: int, **settings) -> Swarm:
        swarms.append(Swarm(machines, MixingSettings(**settings)))
        return swarms[-1]

    yield build
    for each in swarms:
        each.close()


def initial_weights(machine: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(machine))


def gradient_at(machine: int, weights: torch.Tensor) -> torch.Tensor:
    return weights - initial_weights(100 + machine)


def train(machine: int, mixing: NeighbourMixing, weights: torch.Tensor, steps: int) -> None:
    adam = create_adamw(weights)
    for _ in range(steps):
        mixing.start_step(weights)
        weights.grad = gradient_at(machine, weights)
        add_change(mixing, weights)
        adam.step()


def create_adamw(weights: torch.Tensor) -> torch.optim.AdamW:
    return torch.optim.AdamW([weights], RATE, betas=(0.9, 0.95), weight_decay=0.1)


def add_change(mixing: NeighbourMixing, weights: torch.Tensor) -> None:
    change = mixing.compute_change()
    if change is not None:
        weights += change


def reference(topology, machines: int, steps: int) -> list[torch.Tensor]:
    """Train x_i ← Σ_j W_ij x_j − α·AdamW(g_i), with the means of all machines' weights."""
    replicas = [initial_weights(machine) for machine in range(machines)]
    adams = [create_adamw(x) for x in replicas]
    for step in range(steps):
        before = [x.clone() for x in replicas]
        for i, x in enumerate(replicas):
            x.grad = gradient_at(i, before[i])
            group = topology.group_at(machines, i, step)
            x.copy_(torch.stack([before[j] for j in group]).mean(dim=0))
            adams[i].step()
    return replicas


@pytest.mark.parametrize(
    ("topology", "machines"), [(EXPONENTIAL, 4), (RING, 3), (ALTERNATING, 4), (COMPLETE, 3)]
)
def test_mixing_and_adam_equal_the_reference(swarm, topology, machines):
    replicas = [initial_weights(machine) for machine in range(machines)]
    one = swarm(machines, topology=topology)
    one.run(lambda machine, mixing: train(machine, mixing, replicas[machine], 12))
    for ours, theirs in zip(replicas, reference(topology, machines, 12), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert all(mixing.counts.missed == 0 for mixing in one.mixings.values())


def mix(mixing: NeighbourMixing, weights: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        mixing.start_step(weights)
        add_change(mixing, weights)


@pytest.mark.parametrize("bits", [16, 8])
def test_fewer_bits_leave_the_mean_of_all_machines_as_it_is(swarm, bits):
    replicas = [initial_weights(machine) for machine in range(4)]
    mean = torch.stack(replicas).mean(dim=0)
    swarm(4, bits=bits).run(lambda machine, mixing: mix(mixing, replicas[machine], 6))
    assert torch.allclose(torch.stack(replicas).mean(dim=0), mean, atol=1e-5)
    assert float((replicas[0] - mean).abs().max()) < 0.1, "they have come together"


def test_local_progress_survives_a_mixing_every_three_steps(swarm):
    replicas = [torch.full((COUNT,), float(machine)) for machine in range(2)]

    def count_up(machine: int, mixing: NeighbourMixing) -> None:
        for _ in range(3):
            mixing.start_step(replicas[machine])
            replicas[machine] += 1
            add_change(mixing, replicas[machine])

    one = swarm(2, interval=3)
    one.run(count_up)
    assert all(torch.equal(replica, torch.full((COUNT,), 3.5)) for replica in replicas)
    assert [mixing.counts.messages for mixing in one.mixings.values()] == [1, 1]


def test_machine_that_vanishes_costs_a_step_and_not_the_run(swarm):
    one = swarm(4)
    replicas = [initial_weights(machine) for machine in range(4)]
    vanished = threading.Event()

    def run_one(machine: int, mixing: NeighbourMixing) -> None:
        if machine == 3:
            mix(mixing, replicas[machine], 2)
            one.links.pop(one.keys[3]).stop()
            vanished.set()
            return
        for _ in range(30):
            mix(mixing, replicas[machine], 1)
            if mixing.step == 2:
                vanished.wait(TIMEOUT)
        one_left = one.links[one.keys[machine]].neighbours()
        assert len(one_left) == 2

    one.run(run_one)
    spread = torch.stack(replicas[:3]).std(dim=0)
    assert float(spread.max()) < 0.2, "the three others have come together"
    assert all(one.mixings[machine].counts.missed <= 3 for machine in range(3))


def test_machine_that_joins_fetches_weights_and_step_of_a_neighbour(swarm):
    one = swarm(3)
    late = one.keys[2]
    one.links.pop(late).stop()
    replicas = [initial_weights(machine) for machine in range(2)]
    one.run(lambda machine, mixing: mix(mixing, replicas[machine], 5), machines=range(2))
    one.links[late] = one.connect(late)
    one.wait_until_connected(one.keys)
    state = one.links[late].fetch_state(one.keys[0], TIMEOUT)
    assert state is not None
    step, data = state
    weights = torch.frombuffer(bytearray(data), dtype=torch.float32)
    assert step == 4 and torch.allclose(weights, replicas[0], atol=0.2)
    assert one.links[late].fetch_state(STRANGER, TIMEOUT) is None, "nobody is there"


def test_machines_mix_over_iroh():
    secrets = sorted((bytes([n + 1]) * 32 for n in range(2)), key=lambda raw: Identity(raw).key)
    transports = [IrohTransport(secret, host="127.0.0.1") for secret in secrets]
    size = payload_size(COUNT, 32)
    links: list[MeshLinks] = []
    addresses = {}
    for transport in transports:
        # The one with the smaller key listens first; the other dials it.
        members = [Peer(key=each.key, addresses=addresses.get(each.key, [])) for each in transports]
        links.append(ThreadedLinks(transport, members, size, size))
        links[-1].start()
        addresses[transport.key] = transport.addresses()
    replicas = [initial_weights(machine) for machine in range(2)]

    def run_one(machine: int) -> None:
        assert links[machine].wait_for(lambda inbox: len(inbox.neighbours) == 1, TIMEOUT)
        mix(NeighbourMixing(links[machine], MixingSettings()), replicas[machine], 1)

    threads = [threading.Thread(target=run_one, args=(machine,)) for machine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    for each in links:
        each.stop()
    assert torch.allclose(*replicas, atol=1e-6)


def test_stranger_is_not_connected(swarm):
    one = swarm(2)
    members = [Peer(key=key, addresses=[]) for key in one.keys]
    size = payload_size(COUNT, 32)
    stranger = ThreadedLinks(one.network.transport(STRANGER), members, size, size)
    stranger.start()
    replicas = [initial_weights(machine) for machine in range(2)]
    one.run(lambda machine, mixing: mix(mixing, replicas[machine], 4))
    assert all(STRANGER not in links.neighbours() for links in one.links.values())
    stranger.stop()


@pytest.mark.parametrize("interval", [1, 3])
def test_cancelled_mixing_adds_nothing_until_weights_are_sent_again(swarm, interval):
    changes: dict[int, list[torch.Tensor | None]] = {0: [], 1: []}

    def run_one(machine: int, mixing: NeighbourMixing) -> None:
        weights = torch.full((COUNT,), float(machine))
        for step in range(2 * interval):
            mixing.start_step(weights)
            if machine == 0 and step == 0:
                mixing.cancel_mixing()
            changes[machine].append(mixing.compute_change())

    swarm(2, interval=interval).run(run_one)
    idle: list[torch.Tensor | None] = [None] * (interval - 1)
    half = torch.full((COUNT,), 0.5)
    *before, after = changes[0]
    assert before == [None, *idle, *idle], "what would be added leads away from other weights"
    assert after is not None and torch.equal(after, half)
    mixed = [change for change in changes[1] if change is not None]
    assert len(mixed) == 2 and all(torch.equal(change, -half) for change in mixed)


def test_patience_follows_arithmetic_and_not_pauses(swarm, monkeypatch):
    (links,) = swarm(1).links.values()
    mixing = NeighbourMixing(links, MixingSettings())
    assert mixing.patience == PATIENCE.first_seconds
    mix(mixing, initial_weights(0), 1)
    time.sleep(1.0)  # a pause, or an evaluation
    mixing.start_step(initial_weights(0))
    assert mixing.patience < PATIENCE.usual_steps * 1.0
    monkeypatch.setattr(neighbour_mixing, "PATIENCE", Patience(most_seconds=0.1))
    assert mixing.patience == 0.1


def test_patience_counts_the_wait_for_a_slower_machine_that_came(swarm, monkeypatch):
    patient = Patience(least_seconds=PATIENCE.first_seconds)
    monkeypatch.setattr(neighbour_mixing, "PATIENCE", patient)
    one = swarm(2)

    def run_one(machine: int, mixing: NeighbourMixing) -> None:
        for _ in range(5):
            mixing.start_step(initial_weights(machine))
            time.sleep(0.2 * machine)
            mixing.compute_change()

    one.run(run_one)
    monkeypatch.setattr(neighbour_mixing, "PATIENCE", Patience(least_seconds=0.0))
    assert one.mixings[0].patience > PATIENCE.usual_steps * 0.05
    assert all(mixing.counts.missed == 0 for mixing in one.mixings.values())


def test_leaving_ends_the_wait_for_a_neighbour(swarm):
    one = swarm(2)
    asked: list[float] = []

    def should_stop() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 2

    mixing = NeighbourMixing(
        one.links[one.keys[0]], MixingSettings(), should_stop=should_stop
    )  # the other machine never begins its step
    mixing.start_step(initial_weights(0))
    assert mixing.compute_change() is None and mixing.step == 1
    assert 3 <= len(asked) <= 4 and mixing.counts.waited_seconds < PATIENCE.first_seconds
    assert mixing.counts.missed == 0, "nobody was late"


def test_machine_with_huge_weights_sends_none_and_begins_again(swarm, caplog):
    replicas = [torch.ones(COUNT), *(torch.full((COUNT,), 3e38) for _ in range(2))]
    one = swarm(3, topology=COMPLETE)
    one.run(lambda machine, mixing: mix(mixing, replicas[machine], 2))
    assert torch.equal(replicas[0], torch.ones(COUNT))
    assert [one.mixings[machine].has_diverged for machine in range(3)] == [False, True, True]
    assert "the largest weight is 3e+38, and a run's are 16 at most" in caplog.text


def test_liar_with_implausible_weights_is_not_mixed(swarm, monkeypatch, caplog):
    """A neighbour that does not check its own weights sends ones that are too large."""
    monkeypatch.setattr(
        neighbour_mixing,
        "check_weights",
        lambda weights, own=None: None if own is None else check_weights(weights, own),
    )
    for size in (1e9, 9.0):  # beyond any model's weights; out of proportion to the others
        replicas = [torch.ones(COUNT), torch.full((COUNT,), size)]
        one = swarm(2)
        one.run(lambda machine, mixing, each=replicas: mix(mixing, each[machine], 1))
        assert torch.equal(replicas[0], torch.ones(COUNT))
        assert one.mixings[0].counts.refused == 1
    assert "they are 9 times as large as this machine's" in caplog.text


def test_machine_without_finite_weights_holds_nobody_up(swarm, caplog):
    replicas = [torch.ones(COUNT), torch.full((COUNT,), torch.nan)]
    one = swarm(2)
    one.run(lambda machine, mixing: mix(mixing, replicas[machine], 2))
    assert torch.equal(replicas[0], torch.ones(COUNT))
    assert "weights are not sent in this step: they hold values that are not finite" in caplog.text
    assert one.mixings[0].counts.waited_seconds < PATIENCE.first_seconds, (
        "it learnt that nothing comes"
    )


def test_machine_for_which_a_mesh_has_no_place_disturbs_nobody(swarm, monkeypatch, caplog):
    one = swarm(4)
    late = one.keys[3]  # the greatest key dials
    one.links.pop(late).stop()
    one.wait_until_connected(one.keys[:3])
    monkeypatch.setattr(mesh_links, "MAX_MACHINES", 3)
    monkeypatch.setattr(mesh_links, "MEMBER_REDIAL", BackOff(0.05, 60.0))
    one.links[late] = one.connect(late)
    refusals = f"refused to mix with {late[:8]}: at most 3 machines"
    wait_until(lambda: caplog.text.count(refusals) == 3)
    replicas = [initial_weights(machine) for machine in range(3)]
    one.run(lambda machine, mixing: mix(mixing, replicas[machine], 6), machines=range(3))
    assert all(one.mixings[machine].counts.missed == 0 for machine in range(3))
    assert all(late not in one.links[key].neighbours() for key in one.keys[:3])
    assert caplog.text.count(refusals) == 3, "each machine logs one line"


def test_missing_link_is_a_warning_until_it_is_there(swarm, monkeypatch, caplog):
    monkeypatch.setattr(mesh_links, "MEMBER_REDIAL", BackOff(0.05, 60.0))
    one = swarm(3, topology=COMPLETE)
    one.network.partition({one.keys[0]}, {one.keys[1]})
    for key, count in zip(one.keys, (1, 1, 2), strict=True):
        wait_until(lambda key=key, count=count: len(one.links[key].neighbours()) == count)
    barrier = threading.Barrier(3, timeout=TIMEOUT)
    problems: dict[int, str] = {}
    recovered: set[int] = set()

    def run_one(machine: int, mixing: NeighbourMixing) -> None:
        weights = initial_weights(machine)
        mix(mixing, weights, LONELY_MIXINGS - 1)
        assert not mixing.problem
        mix(mixing, weights, 1)
        problems[machine] = mixing.problem
        assert mixing.counts.messages == 0
        if barrier.wait() == 0:
            one.network.heal()
        wait_until(lambda: len(one.links[one.keys[machine]].neighbours()) == 2, TIMEOUT)
        barrier.wait()
        while len(recovered) < 3:
            mix(mixing, weights, 1)
            if not mixing.problem:
                recovered.add(machine)

    one.run(run_one)
    third = one.keys[2][:8]
    assert all(f"trains alone: its neighbours ({third})" in problems[m] for m in (0, 1))
    assert all("no link to each other" in problem for problem in problems.values())
    assert caplog.text.count("this machine trains alone") == 3
