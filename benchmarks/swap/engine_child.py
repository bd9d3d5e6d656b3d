"""Run an engine in a process of its own, by requests.

So its memory is its own, and several engines can take turns. `Child` is the requesting side; run as
a program, this file is the other one. Requests are pickled, replies are lines of JSON. The child
needs torch and the standard library; `trade` needs what the codec needs.
"""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"
REPLY_SECONDS = 3600.0  # A child that takes longer to reply is stuck.
SEED = 11
LEARNING_RATE = 3e-4

PATHS = [str(ROOT / "worker"), str(Path(__file__).parent)]
sys.path[:0] = PATHS


class ChildError(Exception):
    """The child could not do what was requested; the message is one sentence."""


class Child:
    """A plan's engine in a child process, with a folder under build/ that goes with it.

    It is a context manager.
    """

    def __init__(
        self,
        plan: Any,
        *,
        traced: bool = False,
        command_prefix: Sequence[str] = (),
        data_limit: int | None = None,
        device_limit: int | None = None,
        learning_rate: float = LEARNING_RATE,
    ) -> None:
        """Start the child and open the engine.

        Args:
            plan: the plan.
            traced: run every lane in the caller's thread, so that torch's profiler sees all
                allocations.
            command_prefix: comes before the child's own command, for example to enter a cgroup.
            data_limit: bytes of private memory, where there is no cgroup to limit them.
            device_limit: bytes of a GPU's memory.
            learning_rate: the recipe's.

        Raises:
            ChildError: if the engine cannot be opened.
        """
        BUILD.mkdir(parents=True, exist_ok=True)
        self.plan = plan
        self.folder = Path(tempfile.mkdtemp(prefix="state-", dir=BUILD))
        self._process = subprocess.Popen(
            [*command_prefix, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.opened = self.request(
                "open",
                plan=plan,
                folder=self.folder,
                traced=traced,
                learning_rate=learning_rate,
                data_limit=data_limit,
                device_limit=device_limit,
            )
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def request(self, method: str, **arguments: Any) -> Any:
        """Call a method of the child's `EngineHost` and return its result.

        Raises:
            ChildError: if the child fails or dies.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        alarm = threading.Timer(REPLY_SECONDS, self._process.kill)
        alarm.start()
        try:
            pickle.dump((method, arguments), self._process.stdin)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            alarm.cancel()
        if not line:
            status = self._process.wait()
            end = f"ended with status {status}"
            if status == -9:
                end = "was killed, most likely for want of memory"
            raise ChildError(f"the process that was to {method} {end}")
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(reply["error"])
        return reply["value"]


def measure_in_turns(children: Sequence[Child], steps: int) -> list[float]:
    """Let children step in turns, and return the median seconds of each one's steps.

    Each step is over when nothing that it started is running. The first of each is the warm-up.
    """
    seconds: list[list[float]] = [[] for _ in children]
    for _ in range(steps + 1):
        for child, child_seconds in zip(children, seconds, strict=True):
            child_seconds += child.request("steps", count=1, drained=True)["seconds"]
    return [median(child_seconds[1:]) for child_seconds in seconds]


# ---- in the child -----------------------------------------------------------------------------


@dataclass
class ReceivedPayloads:
    """Another machine's update as a worker stores it: one file for each fragment."""

    folder: Path
    sizes: list[int]
    header: str = "another machine's"

    def write(self) -> None:
        """Write an update of random values."""
        import torch

        from barnraise.ledger.codec import encode

        for i, size in enumerate(self.sizes):
            payload, _ = encode(torch.randint(-2000, 2000, (size,), dtype=torch.int32))
            (self.folder / f"update.{i}").write_bytes(payload)

    def decode(self, index: int) -> Any:
        """Return fragment `index`'s int32 units."""
        from barnraise.ledger.codec import decode

        return decode((self.folder / f"update.{index}").read_bytes(), self.sizes[index])


class EngineHost:
    """The child's engine; the result of every public method is sent as JSON."""

    def open(
        self,
        plan: Any,
        folder: Path,
        traced: bool,
        learning_rate: float,
        data_limit: int | None,
        device_limit: int | None,
    ) -> dict[str, Any]:
        """Open the engine; see `Child` for the arguments.

        Returns:
            {"held": {tier: bytes of the static buffers}, "seconds"}.
        """
        if data_limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
        started = time.perf_counter()
        import torch
        from baselines import batches
        from bitwise import HeaderRecorder

        from barnraise.spec import Recipe
        from barnraise.swap.engine import Engine
        from barnraise.swap.state_store import FragmentSequence, StateStore

        if device_limit is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, device_limit / total))
        if traced:
            show_allocations()
        self.plan = plan
        store = StateStore(plan, folder / "state" if plan.on_disk else None)
        anchor = FragmentSequence(store, "anchor")
        for fragment in plan.fragments:
            anchor[fragment.index] = initial_units(fragment)
        recipe = Recipe(learning_rate=learning_rate, optimizer=plan.optimizer)
        self.engine = Engine(
            plan, recipe, store, HeaderRecorder(), lambda progress: str(progress.position)
        )
        self._text = batches(plan.model, plan.sequences * plan.model.context, plan.micro_batches)
        self._position = 0
        self._phase = ""
        self._untorched_peaks: dict[str, int] = {}
        held = {"host": store.host.allocated, "device": store.device.allocated}
        return {"held": held, "seconds": time.perf_counter() - started}

    def retain_freed_memory(self, retain: bool) -> None:
        """Choose whether glibc retains freed memory, instead of the engine."""
        from barnraise.planning.hardware import retain_freed_memory

        retain_freed_memory(retain)

    def steps(self, count: int, drained: bool = False) -> dict[str, list[float]]:
        """Train `count` steps; `drained` ones end when nothing that they started is running.

        Returns:
            "seconds" and "losses" of each step.
        """
        seconds, losses = [], []
        for _ in range(count):
            batch = next(self._text)
            self._position += 1
            started = time.perf_counter()
            losses.append(self.engine.step(batch, position=self._position).loss)
            if drained:
                self.engine.executor.drain()
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds, "losses": losses}

    def trade(self, update: Path) -> dict[str, Any]:
        """Apply another machine's update, end the round, evaluate the anchor, and write samples."""
        self._apply_update(update)
        self._end_round()
        self._evaluate()
        self._write_samples()
        return {}

    def _apply_update(self, update: Path) -> None:
        sizes = [fragment.size for fragment in self.plan.fragments]
        self.engine.queue_updates(ReceivedPayloads(update, sizes))
        self.engine.flush()
        self.engine.apply_queued()

    def _end_round(self) -> None:
        from barnraise.ledger.codec import encode

        traced = tracemalloc.is_tracing()

        def encode_traced(values: Any) -> Any:
            if traced:
                self._enter_phase("encode")
            encoded = encode(values)
            if traced:
                # This phase includes the computation of the next fragments. That is harmless, as
                # the first fragment is the largest.
                self._enter_phase("encoded")
            return encoded

        for part in self.engine.end_round(encode_traced, 1.0):
            del part
        if self.plan.on_disk:
            self.engine.commit()

    def _evaluate(self) -> None:
        import torch

        from barnraise.planning.memory_model import HELD_OUT

        model = self.plan.model
        self.engine.evaluate([torch.randint(model.vocabulary, (HELD_OUT, model.context + 1))])

    def _write_samples(self) -> None:
        from barnraise.planning.memory_model import SAMPLE_WINDOW
        from barnraise.spec import MAX_PROMPTS
        from barnraise.swap.sampler import SamplingSettings, TokenRange

        tokens = 2
        prompt = [1] * (min(SAMPLE_WINDOW, self.plan.model.context) - tokens)
        words = TokenRange(self.plan.model.vocabulary, 0)
        settings = SamplingSettings(tokens)
        for _ in self.engine.generate([prompt] * MAX_PROMPTS, settings, words):
            pass

    def allocated(self, steps: int, update: Path) -> dict[str, int]:
        """Measure the most bytes allocated at once in each phase, besides the static buffers.

        Returns:
            {phase: bytes}: of the first steps, of later "steps", and of what is done between
            steps. "kept" is what the first steps allocate for good; all phases include it.
        """
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            self._enter_phase("first")
            self.steps(2)
            self._enter_phase("steps")
            self.steps(steps)
            self._enter_phase("add")
            self._apply_update(update)
            self._enter_phase("harvest")
            self._end_round()
            self._enter_phase("judge")
            self._evaluate()
            self._enter_phase("sample")
            self._write_samples()
            self._enter_phase("end")
        tracemalloc.stop()
        kineto: Any = record.profiler
        peaks, kept = find_peaks(kineto.kineto_results.events())
        # During steps nothing is allocated outside torch that the plan must count.
        others = self._untorched_peaks | {"first": 0, "steps": 0, "end": 0}
        return {phase: peak + others[phase] for phase, peak in peaks.items()} | {"kept": kept}

    def _enter_phase(self, phase: str) -> None:
        """Begin a phase; payloads and numpy's arrays are counted apart from torch's tensors."""
        from torch.profiler import record_function

        if tracemalloc.is_tracing():
            peak = tracemalloc.get_traced_memory()[1]
            self._untorched_peaks[self._phase] = max(
                self._untorched_peaks.get(self._phase, 0), peak
            )
            tracemalloc.reset_peak()
        else:
            tracemalloc.start()
        with record_function(f"phase {phase}"):
            pass
        self._phase = phase

    def peak(self) -> dict[str, int]:
        """Return the most bytes that this process had in memory, and torch on a GPU."""
        import torch

        lines = Path("/proc/self/status").read_text().splitlines()
        resident = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        device = torch.cuda.max_memory_allocated() if self.plan.device == "cuda" else 0
        return {"resident": resident, "device": device}


def find_peaks(events: Sequence[Any]) -> tuple[dict[str, int], int]:
    """Return the most bytes allocated at once in each phase, and those left before "steps"."""
    peaks: dict[str, int] = {}
    phase = ""
    allocated = kept = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name().startswith("phase "):
            phase = event.name().removeprefix("phase ")
            peaks[phase] = max(peaks.get(phase, 0), allocated)
            if phase == "steps":
                kept = allocated
        elif event.name() == "[memory]":
            allocated += event.nbytes()
            peaks[phase] = max(peaks[phase], allocated)
    return peaks, kept


def initial_units(fragment: Any) -> Any:
    """Return initial weights in units, int32 [size], drawn a few megabytes at a time."""
    import torch

    from barnraise.spec import UNIT_BITS

    generator = torch.Generator().manual_seed(SEED + fragment.index)
    units = torch.zeros(fragment.size, dtype=torch.int32)
    for slot in fragment.slots:
        target = units[slot.offset : slot.offset + slot.size]
        if slot.initial == "ones":
            target.fill_(1 << UNIT_BITS)
        elif slot.initial == "normal":
            for chunk in target.split(1 << 20):
                values = torch.randn(chunk.numel(), generator=generator)
                chunk.copy_(values.mul_(slot.deviation))
    return units


def show_allocations() -> None:
    """Let torch's profiler count all allocations.

    Lanes get no threads, which is correct because a program is a correct sequence by itself. The
    store's temporary copies come from torch's allocator.
    """
    import torch

    from barnraise.planning.plan import PAGE, round_to_pages
    from barnraise.swap import executor, state_store

    class InlineLane(executor.WorkerLane):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"inline": True, "eager": False})

    def page_aligned(size: int) -> torch.Tensor:
        raw = torch.zeros(round_to_pages(size) + PAGE, dtype=torch.uint8)
        return raw[-raw.data_ptr() % PAGE :][:size]

    executor.WorkerLane = InlineLane
    state_store.page_aligned = page_aligned


def answer_requests(host: object) -> None:
    """Call the requested methods of an object, until the requesting side closes the pipe."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever else is printed is not a reply.
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except (EOFError, KeyboardInterrupt):
            return
        call: Callable[..., Any] = getattr(host, method)
        try:
            reply = {"value": call(**arguments)}
        except Exception as error:  # The requesting side decides what an error means.
            reply = {"error": f"{method}: {type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    answer_requests(EngineHost())
