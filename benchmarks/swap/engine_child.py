"""An engine in a process of its own, which does what it is asked: so its memory is its own, and two can take turns.

`Child` is the asking side; run as a program this file is the other one. Requests are pickled, answers lines of JSON.
Needs torch and the standard library; `trade` needs what the codec needs.
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
PATIENCE = 3600.0  # seconds without an answer: it is stuck
SEED, RATE = 11, 3e-4

PATHS = [str(ROOT / "worker"), str(Path(__file__).parent)]
sys.path[:0] = PATHS[:2]


class ChildError(Exception):
    """The child could not do it; one sentence."""


class Child:
    """A plan's engine in a child process, in a folder under build/ that goes when it ends. A context.

    `through`: a command put before the child's own, such as one that enters a cgroup. `traced`: every lane works in
    the caller's thread, so that torch's profiler sees all that is allocated."""

    def __init__(
        self, plan: Any, threads: int | None = None, traced: bool = False, through: Sequence[str] = (),
        data_limit: int | None = None, device_limit: int | None = None, rate: float = RATE,
    ):  # fmt: skip
        BUILD.mkdir(parents=True, exist_ok=True)
        self.plan, self.folder = plan, Path(tempfile.mkdtemp(prefix="state-", dir=BUILD))
        self._process = subprocess.Popen(
            [*through, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        )
        limits = {"data_limit": data_limit, "device_limit": device_limit}
        try:
            self.begun = self.ask(
                "begin", plan=plan, folder=self.folder, traced=traced, rate=rate, **limits
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

    def ask(self, what: str, **given: Any) -> Any:
        """Raises ChildError when the child fails or dies."""
        alarm = threading.Timer(PATIENCE, self._process.kill)
        alarm.start()
        try:
            pickle.dump((what, given), self._process.stdin)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            alarm.cancel()
        if not line:
            code = self._process.wait()
            why = (
                "was killed, most likely for want of memory"
                if code == -9
                else f"ended with status {code}"
            )
            raise ChildError(f"the process that was to {what} {why}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer["value"]


def turns(children: Sequence[Child], steps: int) -> list[float]:
    """Median seconds of a step of each, the machine handed from one to the next after every step; the first of each
    is the warm-up. All that a step set going is waited for."""
    seconds: list[list[float]] = [[] for _ in children]
    for _ in range(steps + 1):
        for child, mine in zip(children, seconds, strict=True):
            mine += child.ask("steps", count=1, drained=True)["seconds"]
    return [median(mine[1:]) for mine in seconds]


# ---- in the child ------------------------------------------------------------------------------------------------


@dataclass
class Payloads:
    """Another machine's update, on disk as the inbox keeps it, or in memory while it is made."""

    folder: Path
    sizes: list[int]
    header: str = "another machine's"

    def write(self) -> None:
        import torch

        from barnraise.exchange.compression.codec import encode

        for i, size in enumerate(self.sizes):
            payload, _ = encode(torch.randint(-2000, 2000, (size,), dtype=torch.int32))
            (self.folder / f"update.{i}").write_bytes(payload)

    def decode(self, index: int) -> Any:
        from barnraise.exchange.compression.codec import decode

        return decode((self.folder / f"update.{index}").read_bytes(), self.sizes[index])


class Trainee:
    """What a child does when asked; every method's result goes into JSON."""

    def begin(
        self,
        plan: Any,
        folder: Path,
        traced: bool,
        rate: float,
        data_limit: int | None,
        device_limit: int | None,
    ) -> dict:
        """`data_limit`: bytes of private memory, where there is no cgroup to keep it in; `device_limit`: of a GPU's."""
        if data_limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
        started = time.perf_counter()
        import torch
        from baselines import batches
        from bitwise import Known

        from barnraise.spec import Recipe
        from barnraise.swap.engine import Engine
        from barnraise.swap.state_store import FragmentSequence, StateStore

        if device_limit is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, device_limit / total))
        if traced:
            _trace()
        self.plan = plan
        store = StateStore(plan, folder / "state" if plan.on_disk else None)
        shelf = FragmentSequence(store, "anchor")
        for fragment in plan.fragments:
            shelf[fragment.index] = initial(fragment)
        recipe = Recipe(learning_rate=rate)
        self.engine = Engine(plan, recipe, store, Known(), lambda progress: str(progress.position))
        self._text = batches(plan.model, plan.sequences * plan.model.context, plan.micro_batches)
        self._position = 0
        held = {"host": store.host.allocated, "device": store.device.allocated}
        return {"held": held, "seconds": time.perf_counter() - started}

    def steps(self, count: int, drained: bool = False) -> dict:
        """`drained`: seconds until nothing is under way."""
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

    def trade(self, update: Path) -> dict:
        """Another machine's update comes in from that folder, the round is harvested, the anchor is judged."""
        self._add(update)
        self._harvest()
        self._judge()
        return {}

    def _add(self, update: Path) -> None:
        self.engine.queue_updates(
            Payloads(update, [fragment.size for fragment in self.plan.fragments])
        )
        self.engine.flush()
        self.engine.apply_queued()

    def _harvest(self) -> None:
        from barnraise.exchange.compression.codec import encode

        def coded(values: Any) -> Any:
            if traced:
                self._enter("encode")
            found = encode(values)
            if traced:
                self._enter("said")  # the next fragments, too: the first is the largest
            return found

        traced = tracemalloc.is_tracing()
        for part in self.engine.end_round(coded, 1.0):
            del part
        if self.plan.on_disk:
            self.engine.commit()

    def _judge(self) -> None:
        import torch

        from barnraise.planning.memory_model import HELD_OUT

        model = self.plan.model
        self.engine.evaluate([torch.randint(model.vocabulary, (HELD_OUT, model.context + 1))])

    def allocated(self, steps: int, update: Path) -> dict:
        """The most bytes at once, besides the static buffers: of "steps", and of each thing done between them. What is
        made once and stays is "kept", and in all of them."""
        from torch.profiler import ProfilerActivity, profile

        self._beside: dict[str, int] = {}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            for name, part in {
                "first": lambda: self.steps(2), "steps": lambda: self.steps(steps),
                "add": lambda: self._add(update), "harvest": self._harvest, "judge": self._judge,
            }.items():  # fmt: skip
                self._enter(name)
                part()
            self._enter("end")
        tracemalloc.stop()
        self._beside["end"] = 0
        events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        found, part, now, kept = {}, "", 0, 0
        for event in events:
            if event.name().startswith("part "):
                part = event.name().removeprefix("part ")
                found[part] = max(found.get(part, 0), now)
                kept = now if part == "steps" else kept
            elif event.name() == "[memory]":
                now += event.nbytes()
                found[part] = max(found[part], now)
        beside = self._beside | {"first": 0, "steps": 0}
        return {name: most + beside[name] for name, most in found.items()} | {"kept": kept}

    def _enter(self, name: str) -> None:
        """What is allocated from here on is this part's; payloads and what numpy decodes are counted beside torch."""
        from torch.profiler import record_function

        if tracemalloc.is_tracing():
            self._beside[self._part] = max(
                self._beside.get(self._part, 0), tracemalloc.get_traced_memory()[1]
            )
            tracemalloc.reset_peak()
        else:
            tracemalloc.start()
        with record_function(f"part {name}"):
            pass
        self._part = name

    def peak(self) -> dict:
        """Bytes: the most this process had in memory since it began, and torch on a GPU."""
        import torch

        lines = Path("/proc/self/status").read_text().splitlines()
        resident = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        return {
            "resident": resident,
            "device": torch.cuda.max_memory_allocated() if self.plan.device == "cuda" else 0,
        }


def initial(fragment: Any) -> Any:
    """int32 [size] units of initial weights, a few megabytes at a time."""
    import torch

    from barnraise.spec import UNIT_BITS

    dice, units = (
        torch.Generator().manual_seed(SEED + fragment.index),
        torch.zeros(fragment.size, dtype=torch.int32),
    )
    for slot in fragment.slots:
        part = units[slot.offset : slot.offset + slot.size]
        if slot.initial == "ones":
            part.fill_(1 << UNIT_BITS)
        elif slot.initial == "normal":
            for some in part.split(1 << 20):
                some.copy_(torch.randn(some.numel(), generator=dice).mul_(slot.deviation))
    return units


def _trace() -> None:
    """Lanes without threads (a program is a correct sequence by itself), and the store's passing copies from torch's
    allocator, so that its profiler counts them."""
    import torch

    from barnraise.swap import arena, executor, state_store

    class Inline(executor.WorkerLane):
        def __init__(self, *given: Any, **more: Any):
            super().__init__(*given, **more | {"inline": True, "eager": False})

    def aligned(size: int) -> torch.Tensor:
        raw = torch.zeros(arena.round_up_to_page(size) + arena.PAGE, dtype=torch.uint8)
        return raw[-raw.data_ptr() % arena.PAGE :][:size]

    executor.WorkerLane = Inline
    state_store.page_aligned = aligned


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    trainee = Trainee()
    while True:
        try:
            what, given = pickle.load(sys.stdin.buffer)
        except (EOFError, KeyboardInterrupt):
            return
        call: Callable[..., Any] = getattr(trainee, what)
        try:
            answer = {"value": call(**given)}
        except Exception as error:  # it is the other side's to judge
            answer = {"error": f"{what}: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
