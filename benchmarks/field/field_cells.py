"""Run one measurement of the benchmark: one system, one line, four workers."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

import torch
from field_job import FieldJob
from field_model import MODEL, FieldGPT, load_flat, validate
from torch import Tensor

from barnraise.planning.lines import Line


class WorkerNetwork(Protocol):
    """Where the workers of a measurement run: `FieldNetwork`, or addresses of one machine.

    Attributes:
        count: workers.
        device: the network device of each worker's address.
    """

    count: int
    device: str

    def host(self, n: int) -> str:
        """Return the address of worker `n`."""
        ...

    def command_prefix(self, n: int) -> list[str]:
        """Return the command that runs other commands at worker `n`."""
        ...

    def shape(self, line: Line | None) -> None:
        """Limit all lines to a line's rates; None: no limit."""

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each worker has sent so far."""
        ...

    def relay_seconds(self) -> float:
        """Return the CPU seconds that delaying packets has taken so far."""
        ...


READY_SECONDS = 180.0
POLL_SECONDS = 0.05
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
LOG_TAIL = 1500
HANGING_KILLS = 2  # without a step for as long as between so many kills, a system hangs


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        system: an adapter's module in `systems`.
        line: as scaled; None: no limit.
        seconds: after which the workers are ended.
        steps: that each worker makes at most; 0: no limit.
        snapshot_steps: steps between two snapshots of the first worker's weights; 0: none.
        options: of the adapter.
        rests: of each worker, in multiples of a step's duration, which makes it slower.
        churn: seconds between two kills of one worker, which restarts at once; 0: none.
    """

    system: str
    line: Line | None
    seconds: float
    steps: int = 0
    snapshot_steps: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    rests: tuple[float, ...] = ()
    churn: float = 0.0


@dataclass
class CellResult:
    """What a measurement found.

    Attributes:
        outcome: "done", "survives", "hangs" or "ends"; of a system that does not start, why.
        steps: of each worker, [monotonic seconds, tokens] as recorded; the first is the begin.
        bytes_sent: by each worker.
        figures: that workers recorded.
        waits: of each worker, the seconds of each step in which it waited for messages.
        losses: (seconds since the begin, steps, loss) of the snapshots.
        relay_seconds: CPU time for delaying packets, on the workers' cores.
    """

    outcome: str
    steps: list[list[tuple[float, int]]]
    bytes_sent: list[int]
    figures: list[dict[str, Any]]
    waits: list[list[float]] = field(default_factory=list)
    losses: list[tuple[float, int, float]] = field(default_factory=list)
    relay_seconds: float = 0.0

    @property
    def step_seconds(self) -> list[float]:
        """Return the durations of the first worker's steps."""
        times = [at for at, _ in self.steps[0]]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def computing_seconds(self) -> list[float]:
        """Return the durations of all workers' steps but the first, without waits for messages."""
        return [
            later[0] - earlier[0] - waited
            for steps, waits in zip(self.steps, self.waits, strict=True)
            for (earlier, later), waited in list(zip(pairwise(steps), waits, strict=False))[1:]
        ]

    @property
    def mean_step_seconds(self) -> float:
        """Return the mean of the first worker's steps; infinity if it made none."""
        return fmean(self.step_seconds) if self.step_seconds else float("inf")

    @property
    def step_deviation(self) -> float:
        """Return the standard deviation of the first worker's steps."""
        return stdev(self.step_seconds) if len(self.step_seconds) > 1 else 0.0

    @property
    def rates(self) -> list[float]:
        """Return each worker's tokens per second."""
        rates = []
        for steps in self.steps:
            span = steps[-1][0] - steps[0][0] if len(steps) > 1 else 0.0
            rates.append(max(tokens for _, tokens in steps) / span if span else 0.0)
        return rates

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all workers together."""
        return sum(self.rates)

    def seconds_to_loss(self, target: float) -> float | None:
        """Return when a snapshot had reached a loss, interpolated; None if none has."""
        return self._interpolate(target, 0)

    def steps_to_loss(self, target: float) -> float | None:
        """Return in which step a snapshot had reached a loss; None if none has."""
        return self._interpolate(target, 1)

    def _interpolate(self, target: float, axis: int) -> float | None:
        previous: tuple[float, int, float] | None = None
        for point in self.losses:
            if point[2] <= target:
                if previous is None:
                    return float(point[axis])
                share = (previous[2] - target) / max(previous[2] - point[2], 1e-9)
                return previous[axis] + share * (point[axis] - previous[axis])
            previous = point
        return None


class WorkerServer:
    """A process in a worker's namespace that runs jobs, one at a time."""

    def __init__(self, command: list[str]) -> None:
        """Start it.

        Args:
            command: that enters the namespace and starts `field_worker.py`.
        """
        paths = [HERE, HERE.parent / "shared", REPOSITORY / "worker"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._job: Path | None = None

    def wait_until_ready(self) -> None:
        """Wait until it has imported what workers need."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RuntimeError("a worker's process did not start; its messages are above")

    def start(self, job: Path) -> None:
        """Start a job; the one before must have ended."""
        assert self._process.stdin is not None
        for suffix in (".pid", ".exit"):
            job.with_suffix(suffix).unlink(missing_ok=True)
        self._job = job
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()

    def poll(self) -> int | None:
        """Return the job's exit code; None while it runs."""
        if self._job is None:
            return 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._job.with_suffix(".exit").read_text())
        return None if self._process.poll() is None else 1

    def kill_job(self) -> None:
        """Kill the job with everything that it has started, and wait for its end.

        A job that has ended may have left processes, as hivemind does.
        """
        if self._job is None:
            return
        self._kill_group()
        while self.poll() is None:
            self._kill_group()
            time.sleep(POLL_SECONDS)
        self._job = None

    def _kill_group(self) -> None:
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            assert self._job is not None
            os.killpg(int(self._job.with_suffix(".pid").read_text()), signal.SIGKILL)

    def close(self) -> None:
        """End the job and the process."""
        self.kill_job()
        self._process.kill()
        self._process.wait()


class FieldRunner:
    """Run cells one after the other in one network."""

    def __init__(
        self, folder: Path, network: WorkerNetwork, pythons: dict[str, str], cleanup: ExitStack
    ) -> None:
        """Run nothing yet.

        Args:
            folder: of the benchmark, with the text.
            network: the workers' lines.
            pythons: the interpreter of systems that need one of their own.
            cleanup: its end kills what still runs.
        """
        self.folder = folder
        self._network = network
        self._pythons = pythons
        self._number = 0
        self._servers: dict[str, list[WorkerServer]] = {}  # by interpreter
        self._workers: list[WorkerServer] = []  # of the current cell
        self._cleanup = cleanup

    def _servers_for(self, system: str) -> list[WorkerServer]:
        """Return the processes that run a system's workers; start them once."""
        python = self._pythons.get(system, sys.executable)
        if python not in self._servers:
            program = [python, str(HERE / "field_worker.py")]
            servers = []
            for n in range(self._network.count):
                servers.append(WorkerServer([*self._network.command_prefix(n), *program]))
                self._cleanup.callback(servers[-1].close)
            for server in servers:
                server.wait_until_ready()
            self._servers[python] = servers
        return self._servers[python]

    def run(self, cell: Cell) -> CellResult:
        """Measure a cell."""
        self._number += 1
        out = self.folder / f"cell.{self._number:03d}.{cell.system}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        self._network.shape(None)
        jobs = self._write_jobs(cell, out)
        self._workers = self._servers_for(cell.system)
        for rank, worker in enumerate(self._workers):
            worker.start(_job_path(out, rank))
        try:
            relayed = -self._network.relay_seconds()
            outcome, sent = self._measure(cell, out)
            relayed += self._network.relay_seconds()
        finally:
            for worker in self._workers:
                worker.kill_job()
        result = replace(read_result(out, jobs), outcome=outcome, bytes_sent=sent)
        result.relay_seconds = relayed
        begin = result.steps[0][0][0] if result.steps[0] else 0.0
        result.losses = evaluate_snapshots(out, self.folder, begin)
        return result

    def _write_jobs(self, cell: Cell, out: Path) -> list[FieldJob]:
        count = self._network.count
        jobs = []
        for rank in range(count):
            job = FieldJob(
                system=cell.system,
                folder=str(self.folder),
                out=str(out),
                rank=rank,
                hosts=tuple(self._network.host(n) for n in range(count)),
                port=20_000 + 32 * (self._number % 1000),
                steps=cell.steps,
                snapshot_steps=cell.snapshot_steps,
                rest=cell.rests[rank] if cell.rests else 0.0,
                device=self._network.device,
                options=cell.options,
            )
            _job_path(out, rank).write_text(job.to_json())
            jobs.append(job)
        return jobs

    def _measure(self, cell: Cell, out: Path) -> tuple[str, list[int]]:
        """Wait for the workers, shape the lines, and watch until the end."""
        count = self._network.count
        deadline = time.monotonic() + READY_SECONDS
        while not all((out / f"ready.{rank}").exists() for rank in range(count)):
            if self._has_failed() or time.monotonic() > deadline:
                return f"does not start: {self._last_words(out)}", [0] * count
            time.sleep(POLL_SECONDS)
        self._network.shape(cell.line)
        before = self._network.bytes_sent()
        (out / "go").touch()
        outcome = self._watch(cell, out)
        after = self._network.bytes_sent()
        return outcome, [now - then for now, then in zip(after, before, strict=True)]

    def _watch(self, cell: Cell, out: Path) -> str:
        started = time.monotonic()
        next_kill = started + cell.churn if cell.churn else float("inf")
        victim = 0
        while (now := time.monotonic()) - started < cell.seconds:
            states = [worker.poll() for worker in self._workers]
            if all(state == 0 for state in states):
                return "done"
            if any(state not in (None, 0) for state in states):
                return "ends" if cell.churn else f"fails: {self._last_words(out)}"
            if now > next_kill:
                next_kill += cell.churn
                victim = victim % (self._network.count - 1) + 1
                self._workers[victim].kill_job()
                self._workers[victim].start(_job_path(out, victim))
            if cell.churn and _idle_seconds(out) > HANGING_KILLS * cell.churn:
                return "hangs"
            time.sleep(POLL_SECONDS)
        if not cell.churn:
            return "done"
        return "survives" if _idle_seconds(out) < cell.seconds / 5 else "hangs"

    def _has_failed(self) -> bool:
        return any(worker.poll() not in (None, 0) for worker in self._workers)

    def _last_words(self, out: Path) -> str:
        """Return the last line that a failed worker printed."""
        for rank, worker in enumerate(self._workers):
            log = _job_path(out, rank).with_suffix(".log")
            if worker.poll() not in (None, 0) and log.exists():
                text = log.read_text(errors="replace")[-LOG_TAIL:].strip()
                return text.splitlines()[-1] if text else "it ended without a message"
        return "the workers did not connect"


def evaluate_snapshots(out: Path, folder: Path, begin: float) -> list[tuple[float, int, float]]:
    """Evaluate the snapshots of a measurement on the same held-out windows, and remove them.

    On a slow line an anchor changes rarely: equal snapshots are evaluated once.

    Args:
        out: the measurement's folder.
        folder: of the benchmark, with the text.
        begin: of the measurement, in monotonic seconds.

    Returns:
        (seconds since the begin, steps, loss) of each snapshot.
    """
    model = FieldGPT()
    losses: list[tuple[float, int, float]] = []
    evaluated: Tensor | None = None
    loss = math.inf
    for path in sorted(out.glob("weights.*")):
        at, flat = torch.load(path, weights_only=True)
        if evaluated is None or not torch.equal(flat, evaluated):
            load_flat(model, _without_padding(flat, model))
            evaluated, loss = flat, validate(model, folder)
        losses.append((at - begin, int(path.suffix[1:]), loss))
        path.unlink()
    return losses


def read_result(out: Path, jobs: list[FieldJob]) -> CellResult:
    """Return what the workers of these jobs recorded in a measurement's folder."""
    return CellResult(
        "",
        [_read_steps(out / f"steps.{job.rank}") for job in jobs],
        [],
        [_read_json(out / f"figures.{job.rank}") for job in jobs],
        [_read_waits(out / f"steps.{job.rank}") for job in jobs],
    )


def _without_padding(flat: torch.Tensor, model: FieldGPT) -> torch.Tensor:
    """Return the parameters of a vector in the layout of an anchor, or of one without padding."""
    fragments = MODEL.fragments()
    if flat.numel() != sum(fragment.size for fragment in fragments):
        return flat
    pieces, offset = [], 0
    for fragment in fragments:
        for slot in fragment.slots:
            begin = offset + slot.offset
            pieces.append(flat[begin : begin + slot.size])
        offset += fragment.size
    assert sum(piece.numel() for piece in pieces) == sum(p.numel() for p in model.parameters())
    return torch.cat(pieces)


def _read_steps(path: Path) -> list[tuple[float, int]]:
    """Read what a worker recorded; a restarted one counts from its start again."""
    steps: list[tuple[float, int]] = []
    total, last = 0, 0
    if not path.exists():
        return [(0.0, 0)]
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a killed worker's last line
            at, tokens, _ = json.loads(line)
            total += max(0, tokens - last) if tokens >= last else tokens
            last = tokens
            steps.append((at, total))
    return steps or [(0.0, 0)]


def _idle_seconds(out: Path) -> float:
    """Return the seconds since the first worker, which is never killed, recorded its last step.

    Args:
        out: the measurement's folder.
    """
    return time.time() - (out / "steps.0").stat().st_mtime


def _read_waits(path: Path) -> list[float]:
    """Read how long a worker waited in each step; its first line is the begin."""
    rows = path.read_text().splitlines()[1:] if path.exists() else []
    return [json.loads(row)[2] for row in rows if row.endswith("]")]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _job_path(out: Path, rank: int) -> Path:
    return out / f"job.{rank}.json"


def with_rests(cell: Cell, speeds: tuple[float, ...]) -> Cell:
    """Return the cell with workers of these relative speeds."""
    fastest = max(speeds)
    return replace(cell, rests=tuple(fastest / speed - 1 for speed in speeds))
