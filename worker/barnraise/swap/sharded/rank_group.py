"""The processes that share one model's state, as rank 0 commands them.

Commands are integer tensors, so that nothing that a rank receives is code. Rank 0 computes its own
part in a thread, because a collective waits for ever for a rank that has died: the calling thread
waits for the result, or for the heartbeat that says that there will be none.
"""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from barnraise.errors import (
    BarnraiseError,
    DeviceLostError,
    MemoryShortageError,
    RankLostError,
    StateError,
)
from barnraise.swap.executor import naming_failures
from barnraise.swap.sharded.heartbeat import DEAD_SECONDS, Heartbeat
from barnraise.swap.sharded.key_value_store import Store, StoreAddress, serve_store
from barnraise.swap.sharded.rank_facts import REACH_SECONDS, collect_facts
from barnraise.swap.sharded.rank_place import RankPlace
from barnraise.swap.sharded.rank_program import WORDS, Opcode, RankProgram

POLL_SECONDS = 0.5  # at which a caller looks for lost ranks
SLOWER = 5.0  # times as long as ever before a command may take: then a rank hangs
UNMEASURED_SECONDS = 900.0  # that the first one of its kind may take
END_SECONDS = 5.0  # that ranks may take to end, or the heartbeat to say why a collective failed
LOOPBACK = "127.0.0.1"
RANK_MODULE = "barnraise.swap.sharded.rank"
RANK_PROGRAM = ("-m", RANK_MODULE)
NO_PORTS = (
    "the ranks have found each other, but gloo or NCCL has not connected them: open all TCP ports "
    "between their machines"
)


class RankGroup:
    """Rank 0 of a group of processes, and those of them that it has started.

    Attributes:
        ranks: how many there are, rank 0 included.
        processes: those that this group has started, rank 1 first.
    """

    def __init__(
        self,
        place: RankPlace,
        command: str = "",
        processes: Sequence["subprocess.Popen[bytes]"] = (),
        store: Store | None = None,
    ) -> None:
        """Join the others as rank 0.

        Args:
            place: of this process.
            command: what all ranks were started for.
            processes: those that were started for this group.
            store: serves all ranks for as long as the group lives; None: somebody else's does.

        Raises:
            StateError: a rank cannot be reached or is different.
        """
        self.ranks, self.processes = place.ranks, list(processes)
        self._place, self._store = place, store
        self._facts = collect_facts(place.device, command)
        self._program = RankProgram(place.device)
        self._heartbeat: Heartbeat | None = None
        self._failure: BarnraiseError | None = None
        self._requests: queue.SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None]
        self._requests = queue.SimpleQueue()
        self._longest: dict[tuple[int, ...], float] = {}  # seconds, by what was commanded
        self._thread = threading.Thread(target=self._serve, name="rank 0", daemon=True)
        self._thread.start()
        try:
            self._call(self._join, 2 * REACH_SECONDS, StateError(NO_PORTS))
        except BaseException as error:
            self._failure = self._failure or StateError(str(error))
            self.close()
            raise

    @classmethod
    def start(cls, devices: Sequence[str], program: Sequence[str] = RANK_PROGRAM) -> "RankGroup":
        """Start a process for each device but the first, which is this process's.

        Args:
            devices: as torch names them.
            program: what Python runs as the other ranks.

        Raises:
            StateError: a process cannot be reached, or ends at once.
        """
        listener = socket.create_server((LOOPBACK, 0))  # no other machine reaches it
        port = listener.getsockname()[1]
        store = serve_store(LOOPBACK, port, REACH_SECONDS, listener.detach())
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, loopback)
        first, *others = (
            RankPlace(rank, len(devices), torch.device(name), StoreAddress(LOOPBACK, port))
            for rank, name in enumerate(devices)
        )
        processes = [_start_process(place, program) for place in others]
        return cls(first, processes=processes, store=store)

    # ---- rank 0's own part ---------------------------------------------------------------------

    def _serve(self) -> None:
        """Compute what is requested, in a thread of its own."""
        while (request := self._requests.get()) is not None:
            future, compute = request
            try:
                with naming_failures("the ranks' computation failed"):
                    future.set_result(compute())
            except BaseException as error:
                future.set_exception(error)

    def _join(self) -> Tensor:
        """Join the others."""
        store = self._place.find_others(self._facts)
        self._heartbeat = Heartbeat(self._place.address, 0, self.ranks)
        self._place.join_group(store)
        return torch.empty(0)

    def _command(self, words: list[int], payload: Tensor | None) -> Tensor:
        """Send a command to the other ranks, and execute it here."""
        dist.broadcast(torch.tensor(words), 0)
        return self._program.execute(words, payload)

    def execute(self, opcode: Opcode, *numbers: int, payload: Tensor | None = None) -> Tensor:
        """Let all ranks execute a command, and return the result.

        Args:
            opcode: the command.
            numbers: what `Opcode` states for it.
            payload: what all ranks receive.

        Raises:
            BarnraiseError: a rank failed or was lost. The group is of no use any longer.
        """
        if self._failure is not None:
            raise self._failure
        words = [opcode, *numbers]
        command = partial(self._command, words + [0] * (WORDS - len(words)), payload)
        measured = tuple(words[: 1 if opcode == Opcode.APPLY else 3])
        longest = self._longest.get(measured, 0.0)
        limit = max(DEAD_SECONDS, SLOWER * longest) if longest else UNMEASURED_SECONDS
        started = time.monotonic()
        late = f"the ranks are alive, but have not done their part of a step in {limit:.0f} seconds"
        result = self._call(command, limit, RankLostError(late))
        self._longest[measured] = max(longest, time.monotonic() - started)
        return result

    def _call(self, compute: Callable[[], Tensor], seconds: float, late: BarnraiseError) -> Tensor:
        """Return what rank 0's thread computes; polls count, not the time of a stopped process."""
        future: Future[Tensor] = Future()
        self._requests.put((future, compute))
        polls = 0
        while not wait([future], POLL_SECONDS).done:
            polls += 1
            is_late = polls * POLL_SECONDS > seconds
            if is_late and self._heartbeat is not None:
                self._heartbeat.wait_for_failure()  # it names a rank that is stopped
            lost = self._find_lost()
            if lost or is_late:
                self._failure = RankLostError(lost) if lost else late
                raise self._failure
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, BarnraiseError):
            error = self._failure = self._explain(error)
        raise error

    def _find_lost(self) -> str:
        """Return a sentence about a rank that is gone; "" while all are there."""
        ended = [rank for rank, each in enumerate(self.processes, 1) if each.poll() is not None]
        if ended and self._heartbeat is not None:
            self._heartbeat.wait_for_failure()  # the rank may have reported why
        if self._heartbeat is not None and self._heartbeat.failure:
            return self._heartbeat.failure
        return f"rank {ended[0]} has ended, without a reason" if ended else ""

    def _explain(self, error: BarnraiseError) -> BarnraiseError:
        """Return why a command failed here: perhaps because another rank was lost."""
        if isinstance(error, MemoryShortageError | DeviceLostError) or self._heartbeat is None:
            return error
        deadline = time.monotonic() + DEAD_SECONDS + END_SECONDS
        while time.monotonic() < deadline:
            if lost := self._find_lost():
                return RankLostError(lost)
            time.sleep(POLL_SECONDS)
        return RankLostError(str(error))

    def close(self) -> None:
        """End all ranks, with force those that do not."""
        if self._failure is None:
            with contextlib.suppress(BarnraiseError):
                self.execute(Opcode.END)
        if self._heartbeat is not None:
            if self._failure is not None:
                self._heartbeat.report_failure(str(self._failure))
            self._heartbeat.close()
        deadline = time.monotonic() + (END_SECONDS if self._failure is None else 0)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self._requests.put(None)
        self._thread.join(END_SECONDS)  # it may wait for ranks on other machines
        if not self._thread.is_alive() and dist.is_initialized():
            dist.destroy_process_group()


def _start_process(place: RankPlace, program: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the process of a rank on this machine, with the code of this process."""
    code = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, *program],
        env=os.environ | place.to_environment() | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
    )
