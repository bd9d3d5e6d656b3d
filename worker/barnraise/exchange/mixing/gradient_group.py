"""Average gradients within one group of machines, by `torch.distributed` over gloo.

gloo connects every member to every other one by TCP, so machines must reach each other directly.
It neither encrypts nor authenticates: it is for networks whose machines trust each other. Its
collectives end by themselves only when a member's program ends or after `COLLECTIVE_SECONDS`; so
the waiting thread looks several times a second whether the group is still whole, and abandons it
otherwise. What an abandoned collective still writes to belongs to this module.
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from barnraise.errors import BarnraiseError
from barnraise.peering.addresses.addresses import host_of, port_of
from barnraise.protocol.group_messages import GroupInvitation

COLLECTIVE_SECONDS = 300.0  # after which gloo gives a collective up
CONNECT_SECONDS = 15.0  # for all members to connect to each other, once they have met
MEET_SECONDS = 15.0  # for all members to reach the leader's store
DIAL_SECONDS = 3.0  # for one of the leader's addresses to answer
POLL_SECONDS = 0.2
_c10d: Any = dist  # torch's stubs describe neither stores nor process groups
SOURCE_PLACE = re.compile(r"^\[\S+:\d+\]\s*")
GO, GIVE_UP = "go", "give up"  # what the leader writes after each phase


class KeyValueStore(Protocol):
    """What the members of a group use of a store of `torch.distributed`."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value, which exists."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these have a value."""
        ...


class ProcessGroupLike(Protocol):
    """What a group uses of a process group of `torch.distributed`. Both methods return at once."""

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """Replace each tensor by its sum over all members."""

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """Replace a tensor by that of one member."""


class GroupLostError(BarnraiseError):
    """A group ended, or did not come about: its members form another one.

    Attributes:
        missing: the members that the leader waited for in vain.
        were_met: whether all had reached the leader, but not each other.
    """

    def __init__(self, sentence: str, missing: Sequence[str] = (), were_met: bool = False) -> None:
        """State why, in one sentence."""
        super().__init__(sentence)
        self.missing = tuple(missing)
        self.were_met = were_met


class GradientGroup:
    """The machines that average gradients now.

    Attributes:
        name: of the group.
        members: their keys, sorted; a member's place is its rank.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[str],
        process_group: ProcessGroupLike | None,
        find_problem: Callable[[], str],
    ) -> None:
        """Use a process group.

        Args:
            name: of the group.
            members: keys, sorted.
            process_group: of all members; None for a machine alone.
            find_problem: returns why the group is not whole any longer, or "".
        """
        self.name = name
        self.members = tuple(members)
        self._process_group = process_group
        self._find_problem = find_problem
        self._work: Any = None  # the collective that is under way
        self._buffer = torch.empty(0)  # that gloo reads and writes

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.members)

    def sum_values(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all members.

        Raises:
            GroupLostError: A member is gone.
        """
        if self._process_group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        self._complete(self._process_group.allreduce([total]), total)
        return total.tolist()

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean over all members: the same bits on all of them.

        Args:
            tensors: fp32 [n] each, in any memory, contiguous.

        Raises:
            GroupLostError: A member is gone; some of the tensors are replaced already.
        """
        if self._process_group is None:
            return
        for tensor in tensors:
            buffer = self._reserve(tensor.numel())
            buffer.copy_(tensor)
            self._complete(self._process_group.allreduce([buffer]), buffer)
            tensor.copy_(buffer.div_(self.size))

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, source: str) -> None:
        """Replace a tensor by that of one member.

        Args:
            tensor: in host memory, contiguous.
            source: the member's key.

        Raises:
            GroupLostError: A member is gone.
        """
        if self._process_group is None:
            return
        buffer = tensor.clone()
        rank = self.members.index(source)
        self._complete(self._process_group.broadcast(buffer, rank), buffer)
        tensor.copy_(buffer)

    def close(self) -> None:
        """Leave the group. A collective that is under way is waited for by a thread of its own."""
        remains = [self._process_group, self._work, self._buffer]
        is_busy = self._work is not None
        self._process_group = self._work = None
        self._buffer = torch.empty(0)
        if is_busy:
            threading.Thread(target=remains.clear, name="barnraise-gloo-end", daemon=True).start()

    def _reserve(self, count: int) -> Tensor:
        """Return a buffer, fp32 [count], that only this group writes to."""
        if self._buffer.numel() < count:
            self._buffer = torch.empty(count)
        return self._buffer[:count]

    def _complete(self, work: Any, buffer: Tensor) -> None:
        """Wait for a collective while the group is whole.

        Raises:
            GroupLostError: It is not, or the collective failed.
        """
        self._work = [work, buffer]
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(POLL_SECONDS):
            if problem := self._find_problem():
                raise GroupLostError(problem)
        try:
            work.wait()
        except RuntimeError as error:
            raise GroupLostError(f"a collective failed: {_first_line(error)}") from None
        finally:
            self._work = None


class GroupConnector:
    """Connect the members of an invitation to each other by TCP, in two phases.

    First every member reaches the leader's store, which tells each one at which of its own
    addresses the network of the group is. Then all connect to each other. After each phase the
    leader decides whether the group comes about, so that either all members begin or none.
    """

    def __init__(self, key: str, should_stop: Callable[[], bool]) -> None:
        """Connect nothing yet.

        Args:
            key: this machine's own.
            should_stop: called several times a second; ends an attempt.
        """
        self._key = key
        self._should_stop = should_stop
        self._server: Any = None

    def serve_store(self) -> int:
        """Start this machine's store, if it has none; return its TCP port.

        Raises:
            OSError: No port is free.
        """
        if self._server is None:
            try:
                self._server = _open_store("127.0.0.1", 0, is_leader=True)
            except (RuntimeError, ValueError) as error:
                raise OSError(f"no store can be served: {_first_line(error)}") from None
        return self._server.port

    def connect(
        self, invitation: GroupInvitation, find_problem: Callable[[], str]
    ) -> GradientGroup:
        """Connect to the other members.

        Args:
            invitation: names them.
            find_problem: returns why the group is not whole any longer, or "".

        Raises:
            GroupLostError: The group did not come about.
        """
        members = invitation.members
        if len(members) == 1:
            return GradientGroup(invitation.group, members, None, find_problem)
        try:
            process_group = self._connect_members(invitation)
        except (RuntimeError, ValueError, OSError) as error:
            raise GroupLostError(f"no group came about: {_first_line(error)}") from None
        return GradientGroup(invitation.group, members, process_group, find_problem)

    def _connect_members(self, invitation: GroupInvitation) -> ProcessGroupLike:
        members, name = invitation.members, invitation.group
        rank = members.index(self._key)
        if rank == 0:
            assert self._server is not None, "the leader's invitation names its store"
            client, reached = self._server, ""
        else:
            client, reached, own_host = _reach_store(invitation.addresses)
        store = _c10d.PrefixStore(name, client)

        # Meet at the leader's store.
        if rank == 0:
            hosts = self._gather(store, "reached", members, MEET_SECONDS)
            own_host = max(sorted(hosts), key=hosts.count)
            self._decide(store, "reached", GO)
        else:
            store.set(f"reached/{rank}", reached)
            self._await_decision(store, "reached", MEET_SECONDS)

        # Connect to all others.
        try:
            process_group = _open_process_group(store, rank, len(members), own_host)
        except (RuntimeError, ValueError):
            if rank == 0:  # the members without a connection do not report
                self._gather(store, "connected", members, DIAL_SECONDS)
                self._decide(store, "connected", GIVE_UP)
            raise
        if rank == 0:
            self._gather(store, "connected", members, CONNECT_SECONDS)
            self._decide(store, "connected", GO)
        else:
            store.set(f"connected/{rank}", "yes")
            self._await_decision(store, "connected", CONNECT_SECONDS)
        return process_group

    def _gather(
        self, store: KeyValueStore, phase: str, members: Sequence[str], seconds: float
    ) -> list[str]:
        """Wait for what all other members report in a phase, and return it.

        Raises:
            GroupLostError: Some did not report.
        """
        awaited = {f"{phase}/{rank}": key for rank, key in enumerate(members) if rank}
        deadline = time.monotonic() + seconds
        missing = list(awaited)
        while missing := [name for name in missing if not store.check([name])]:
            if time.monotonic() > deadline or self._should_stop():
                self._decide(store, phase, GIVE_UP)
                keys = [awaited[name] for name in missing]
                who = ", ".join(key[:8] for key in keys)
                target = "this machine" if phase == "reached" else "each other"
                raise GroupLostError(
                    f"{who} did not reach {target} by TCP: all-reduce needs machines that reach "
                    "each other directly, in one LAN or cluster",
                    keys,
                    were_met=phase == "connected",
                )
            time.sleep(POLL_SECONDS / 4)
        return [store.get(name).decode() for name in awaited]

    def _decide(self, store: KeyValueStore, phase: str, decision: str) -> None:
        store.set(f"{phase}/decision", decision)

    def _await_decision(self, store: KeyValueStore, phase: str, seconds: float) -> None:
        """Wait until the leader has decided that the group goes on.

        Raises:
            GroupLostError: It has not.
        """
        name = f"{phase}/decision"
        deadline = time.monotonic() + 2 * seconds  # the leader gives up first
        while not store.check([name]):
            if time.monotonic() > deadline or self._should_stop():
                raise GroupLostError("the leader of the group does not answer")
            time.sleep(POLL_SECONDS / 4)
        if store.get(name).decode() != GO:
            raise GroupLostError("not all machines of the group reached each other by TCP")


def _open_store(host: str, port: int, is_leader: bool = False) -> KeyValueStore:
    return _c10d.TCPStore(
        host,
        port,
        is_master=is_leader,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_SECONDS),
    )


def _reach_store(addresses: Sequence[str]) -> tuple[KeyValueStore, str, str]:
    """Return the leader's store, its host as reached, and this machine's own host there.

    Raises:
        GroupLostError: None of the addresses answers.
    """
    for address in addresses:
        host, port = host_of(address), port_of(address)
        with suppress(OSError):
            with socket.create_connection((host, port), DIAL_SECONDS) as probe:
                own_host = probe.getsockname()[0]
            return _open_store(host, port), host, own_host
    raise GroupLostError(
        "this machine does not reach the leader of the group by TCP at "
        f"{', '.join(addresses) or 'any address'}"
    )


def _open_process_group(
    store: KeyValueStore, rank: int, size: int, own_host: str
) -> ProcessGroupLike:
    """Connect to all other ranks, from one of this machine's own addresses."""
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_host)]
    options._timeout = timedelta(seconds=CONNECT_SECONDS)
    process_group = gloo(_c10d.PrefixStore("gloo", store), rank, size, options)
    process_group.set_timeout(timedelta(seconds=COLLECTIVE_SECONDS))
    return process_group


def _first_line(error: BaseException) -> str:
    """Return the first sentence of an error of torch, without the place in its source."""
    line = str(error).strip().partition("\n")[0]
    return SOURCE_PLACE.sub("", line).partition(". ")[0][:300]
