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
from dataclasses import dataclass, field
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
from barnraise.swap.sharded.rank_program import WORDS, Opcode, RankProgram, float_to_word

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


@dataclass
class _Request:
    """A command that rank 0's thread is to execute, and what became of it."""

    words: list[int] = field(default_factory=list)
    payload: Tensor | None = None
    is_done: threading.Event = field(default_factory=threading.Event)
    result: Tensor | None = None
    error: BarnraiseError | None = None


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
        self._heartbeat: Heartbeat | None = None
        self._failure: BarnraiseError | None = None
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._longest: dict[tuple[int, ...], float] = {}  # seconds, by what was commanded
        joined = _Request()
        self._thread = threading.Thread(
            target=self._serve, args=(joined,), name="rank 0", daemon=True
        )
        self._thread.start()
        try:
            self._wait(joined, 2 * REACH_SECONDS, StateError(NO_PORTS))
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

    # ---- commands ------------------------------------------------------------------------------

    def build(self, description: bytes) -> None:
        """Build a model of zeros on all ranks, as `SharedSettings` describe it."""
        payload = torch.frombuffer(bytearray(description), dtype=torch.uint8)
        self._execute([Opcode.BUILD, len(description)], payload)

    def accumulate(self, tokens: Tensor, of_step: int) -> None:
        """Add the gradients of int64 [sequences, context + 1], of so many sequences of a step."""
        self._execute([Opcode.ACCUMULATE, len(tokens), of_step], tokens.contiguous())

    def apply(self, number: int, rate: float, decay: float, limit: float) -> tuple[float, float]:
        """Make AdamW's step number `number`; return the loss and the gradient's norm.

        Nothing changes if one of the two is not finite. The norm is limited.
        """
        words = [float_to_word(value) for value in (rate, decay, limit)]
        result = self._execute([Opcode.APPLY, number, *words])
        assert result is not None
        loss, norm = result.tolist()
        return loss, norm

    def drop(self) -> None:
        """Drop the gradients that were accumulated."""
        self._execute([Opcode.DROP])

    def gather(self, kind: int, i: int) -> Tensor:
        """Return a kind of state of fragment i, fp32 [n], on the host."""
        result = self._execute([Opcode.GATHER, kind, i])
        assert result is not None
        return result

    def scatter(self, kind: int, i: int, flat: Tensor) -> None:
        """Replace a kind of state of fragment i by fp32 [n] on the host."""
        self._execute([Opcode.SCATTER, kind, i], flat.contiguous())

    def release(self) -> None:
        """Free the model on all ranks, which wait for another one."""
        self._execute([Opcode.RELEASE])

    # ---- rank 0's own part ---------------------------------------------------------------------

    def _serve(self, joined: _Request) -> None:
        """Join the others and execute commands, in a thread of its own."""

        def join() -> None:
            store = self._place.find_others(self._facts)
            self._heartbeat = Heartbeat(self._place.address, 0, self.ranks)
            self._place.join_group(store)

        _record_outcome(joined, join)
        if joined.error is not None:
            return
        program = RankProgram(self._place.device)
        while (request := self._requests.get()) is not None:
            _record_outcome(request, partial(_command, program, request))

    def _execute(self, words: list[int], payload: Tensor | None = None) -> Tensor | None:
        """Let all ranks execute a command, and return the result.

        Raises:
            BarnraiseError: a rank failed or was lost. The group is of no use any longer.
        """
        if self._failure is not None:
            raise self._failure
        request = _Request(words + [0] * (WORDS - len(words)), payload)
        self._requests.put(request)
        measured = tuple(words[: 1 if words[0] == Opcode.APPLY else 3])
        longest = self._longest.get(measured, 0.0)
        limit = max(DEAD_SECONDS, SLOWER * longest) if longest else UNMEASURED_SECONDS
        started = time.monotonic()
        late = f"the ranks are alive, but have not done their part of a step in {limit:.0f} seconds"
        result = self._wait(request, limit, RankLostError(late))
        self._longest[measured] = max(longest, time.monotonic() - started)
        return result

    def _wait(self, request: _Request, seconds: float, late: BarnraiseError) -> Tensor | None:
        """Wait for a result; polls count, so that a process that was stopped is not late."""
        polls = 0
        while not request.is_done.wait(POLL_SECONDS):
            polls += 1
            if lost := self._find_lost():
                self._failure = RankLostError(lost)
                raise self._failure
            if polls * POLL_SECONDS > seconds:
                if self._heartbeat is not None:
                    self._heartbeat.wait_for_failure()  # it names a rank that is stopped
                lost = self._find_lost()
                self._failure = RankLostError(lost) if lost else late
                raise self._failure
        if request.error is not None:
            self._failure = self._explain(request.error)
            raise self._failure
        return request.result

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
                self._execute([Opcode.END])
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


def _command(program: RankProgram, request: _Request) -> Tensor | None:
    """Send a command to the other ranks, and execute it here."""
    dist.broadcast(torch.tensor(request.words), 0)
    return program.execute(request.words, request.payload)


def _record_outcome(request: _Request, execute: Callable[[], Tensor | None]) -> None:
    """Execute a request, and record its result or what went wrong."""
    try:
        with naming_failures("the ranks' computation failed"):
            request.result = execute()
    except BarnraiseError as error:
        request.error = error
    except BaseException as error:  # a bug: the caller must not wait for a thread that is gone
        request.error = StateError(f"the ranks' computation failed: {error!r}")
        request.is_done.set()
        raise
    request.is_done.set()


def _start_process(place: RankPlace, program: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the process of a rank on this machine, with the code of this process."""
    code = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, *program],
        env=os.environ | place.to_environment() | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
    )
