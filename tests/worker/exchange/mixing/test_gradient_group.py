"""Test groups over gloo, in threads of one process: means, vanished members, and failures."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from helpers.wait_for import wait_until

from barnraise.exchange.mixing import gradient_group
from barnraise.exchange.mixing.gradient_group import GradientGroup, GroupConnector, GroupLostError
from barnraise.protocol.group_messages import GroupInvitation
from barnraise.protocol.signing import Identity

KEYS = sorted(Identity(bytes([n]) * 32).key for n in (1, 2, 3))
LIMIT = 120  # seconds that only a failure reaches


def never() -> bool:
    return False


def whole() -> str:
    return ""


class Members:
    """Machines in threads that connect to one group."""

    def __init__(self, keys: list[str], addresses: Callable[[int], list[str]]) -> None:
        self.pool = ThreadPoolExecutor(len(keys))
        self.connectors = {key: GroupConnector(key, never) for key in keys}
        port = self.connectors[keys[0]].serve_store()
        self.invitation = GroupInvitation(
            group="0" * 32,
            members=keys,
            source=keys[0],
            shares_state=True,
            addresses=addresses(port),
        )

    @property
    def store(self) -> torch.distributed.Store:
        """Return what the members have reported to the leader."""
        server = self.connectors[self.invitation.members[0]]._server
        return torch.distributed.PrefixStore(self.invitation.group, server)

    def connect(self, *keys: str, find_problem: Callable[[], str] = whole) -> list[Future]:
        return [
            self.pool.submit(self.connectors[key].connect, self.invitation, find_problem)
            for key in keys
        ]


def loopback(port: int) -> list[str]:
    return ["127.0.0.1:1", f"127.0.0.1:{port}"]  # nothing answers at the first one


def run_on_all(members: Members, groups: list[GradientGroup], function) -> list:
    futures = [members.pool.submit(function, rank, each) for rank, each in enumerate(groups)]
    return [future.result(LIMIT) for future in futures]


def test_members_get_the_same_mean_sums_and_the_sources_state():
    members = Members(KEYS, loopback)
    groups = [future.result(LIMIT) for future in members.connect(*KEYS)]
    parts = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))

    def agree(rank: int, group: GradientGroup):
        gradients = [parts[rank, :10].clone(), parts[rank, 10:].clone()]
        sums = group.sum_values([1.0, rank])
        group.average(gradients)
        state = torch.full((3, 4), float(rank))
        group.broadcast(state, KEYS[1])
        return sums, torch.cat(gradients), state

    results = run_on_all(members, groups, agree)
    for sums, mean, state in results:
        assert sums == [3.0, 3.0] and torch.equal(state, torch.ones(3, 4))
        assert torch.equal(mean, results[0][1]), "the same bits everywhere"
        assert torch.allclose(mean, parts.mean(0), atol=1e-6)
    for group in groups:
        group.close()


def test_member_whose_program_ends_ends_the_collective_of_the_others():
    members = Members(KEYS[:2], loopback)
    groups = [future.result(LIMIT) for future in members.connect(*KEYS[:2])]
    waiting = members.pool.submit(groups[0].sum_values, [1.0])
    groups.pop().close()
    with pytest.raises(GroupLostError, match=r"a collective failed: [CR]\w+ "):
        waiting.result(LIMIT)
    groups[0].close()


def test_collective_is_abandoned_when_the_group_is_not_whole():
    lost = threading.Event()
    members = Members(KEYS[:2], loopback)

    def problem() -> str:
        return "ben is gone" if lost.is_set() else ""

    groups = [f.result(LIMIT) for f in members.connect(*KEYS[:2], find_problem=problem)]
    gradient = torch.ones(4)
    waiting = members.pool.submit(groups[0].average, [gradient])
    lost.set()
    with pytest.raises(GroupLostError, match="ben is gone"):
        waiting.result(LIMIT)
    groups[0].close()
    groups[1].close()
    assert torch.equal(gradient, torch.ones(4)), "gloo writes to memory of its own"


def test_group_without_a_member_does_not_come_about_and_names_it(monkeypatch):
    monkeypatch.setattr(gradient_group, "MEET_SECONDS", 0.5)
    members = Members(KEYS, loopback)
    (follower,) = members.connect(KEYS[1])
    wait_until(lambda: members.store.check(["reached/1"]))
    (leader,) = members.connect(KEYS[0])
    with pytest.raises(GroupLostError, match=f"{KEYS[2][:8]} did not reach this machine") as error:
        leader.result(LIMIT)
    assert error.value.missing == (KEYS[2],) and not error.value.were_met
    with pytest.raises(GroupLostError, match=r"not all machines|does not answer"):
        follower.result(LIMIT)


def test_unreachable_leader_is_a_sentence_with_its_addresses():
    members = Members(KEYS[:2], lambda port: ["127.0.0.1:1"])
    with pytest.raises(GroupLostError, match=r"does not reach the leader .* at 127\.0\.0\.1:1"):
        members.connect(KEYS[1])[0].result(LIMIT)


def test_machine_alone_averages_with_itself():
    members = Members(KEYS[:1], loopback)
    (group,) = (future.result(LIMIT) for future in members.connect(KEYS[0]))
    gradient = torch.ones(3)
    group.average([gradient])
    group.broadcast(gradient, KEYS[0])
    assert torch.equal(gradient, torch.ones(3)) and group.sum_values([2.0]) == [2.0]
    group.close()
