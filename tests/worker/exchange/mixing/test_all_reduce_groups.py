"""Test groups of machines in threads: links in memory, gradients over gloo."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.memory_transport import MemoryNetwork
from helpers.wait_for import wait_until

from barnraise.exchange.mixing import gradient_group, group_agreement
from barnraise.exchange.mixing.all_reduce_groups import AllReduceGroups, JoinedGroup
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.mesh_members import FixedMembership
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity

KEYS = sorted(Identity(bytes([n]) * 32).key for n in (1, 2, 3))
LIMIT = 120  # seconds that only a failure reaches


def never() -> bool:
    return False


class Machines:
    """Machines that know each other."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(len(KEYS))
        self._network = MemoryNetwork()
        self._members = [Peer(key=key, addresses=[f"memory:{key[:16]}"]) for key in KEYS]
        self.links: dict[str, MeshLinks] = {}
        self.groups: dict[str, AllReduceGroups] = {}

    def start(self, *keys: str) -> None:
        """Start machines, and wait until all that have been started are linked."""
        for key in keys:
            membership = FixedMembership(self._network.transport(key), self._members)
            self.links[key] = MeshLinks(membership, 0, 0)
            self.links[key].start()
            self.groups[key] = AllReduceGroups(self.links[key], never)
        others = len(self.links) - 1
        wait_until(lambda: all(len(each.neighbours()) == others for each in self.links.values()))

    def on_all(self, function, *keys: str) -> list:
        """Call a function with each machine's groups, at the same time."""
        futures = [self.pool.submit(function, self.groups[key]) for key in keys]
        return [future.result(LIMIT) for future in futures]

    def close(self) -> None:
        for key, links in self.links.items():
            self.groups[key].close()
            links.stop()
        self.pool.shutdown()


@pytest.fixture
def machines() -> Iterator[Machines]:
    all_machines = Machines()
    yield all_machines
    all_machines.close()


def join(groups: AllReduceGroups) -> JoinedGroup:
    joined = groups.join(0, 0.1, never)
    assert joined is not None
    groups.confirm_state()
    return joined


def take_step(groups: AllReduceGroups) -> tuple[bool, float]:
    """Average a gradient of one; return whether the group goes on, and the mean."""
    gradient = torch.ones(3)
    assert groups.average_gradients(1.0, [gradient])
    return groups.record_step(), float(gradient.mean())


def test_newcomer_is_met_after_the_same_step_and_needs_the_state(machines):
    machines.start(*KEYS[1:])
    first = machines.on_all(join, *KEYS[1:])
    assert first == [JoinedGroup(KEYS[1], True, 2)] * 2
    assert machines.on_all(take_step, *KEYS[1:]) == [(True, 1.0)] * 2

    # The newcomer has the smallest key and will lead; the others see that it waits.
    machines.start(KEYS[0])
    newcomer = machines.pool.submit(join, machines.groups[KEYS[0]])
    steps = [(True, 1.0)] * 2
    while all(goes_on for goes_on, _ in steps):
        steps = machines.on_all(take_step, *KEYS[1:])
    assert steps == [(False, 1.0)] * 2, "both leave after the same step"

    def leave_and_join(groups: AllReduceGroups) -> JoinedGroup:
        groups.leave()
        return join(groups)

    joined = [*machines.on_all(leave_and_join, *KEYS[1:]), newcomer.result(LIMIT)]
    assert joined == [JoinedGroup(KEYS[1], True, 3)] * 3, "a trained member shares its state"


def test_loss_that_is_not_finite_spoils_the_gradients_of_all(machines):
    machines.start(*KEYS[:2])
    machines.on_all(join, *KEYS[:2])

    def spoil(groups: AllReduceGroups) -> bool:
        gradient = torch.ones(3)
        loss = float("inf") if groups is machines.groups[KEYS[0]] else 1.0
        assert groups.average_gradients(loss, [gradient])
        return bool(gradient.isnan().all())

    assert machines.on_all(spoil, *KEYS[:2]) == [True, True]


def test_member_that_pauses_ends_the_step_of_the_others(machines):
    machines.start(*KEYS[:2])
    machines.on_all(join, *KEYS[:2])
    waiting = machines.pool.submit(machines.groups[KEYS[0]].average_gradients, 1.0, [torch.ones(3)])
    machines.groups[KEYS[1]].leave(is_pausing=True)
    assert waiting.result(LIMIT) is False
    alone = machines.on_all(join, KEYS[0])
    assert [each.size for each in alone] == [1] and not machines.groups[KEYS[0]].problem


def test_machines_that_do_not_reach_each_other_train_alone_and_say_so(machines, monkeypatch):
    monkeypatch.setattr(gradient_group, "MEET_SECONDS", 0.5)
    monkeypatch.setattr(group_agreement, "GATHER_SECONDS", 2.0)
    monkeypatch.setattr(group_agreement, "FOLLOW_SECONDS", 10.0)
    machines.start(*KEYS[:2])

    def refuse(*arguments):
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    joined = machines.on_all(join, *KEYS[:2])
    assert [each.size for each in joined] == [1, 1]
    problems = [machines.groups[key].problem for key in KEYS[:2]]
    assert any("trains alone" in problem and "by TCP" in problem for problem in problems)
