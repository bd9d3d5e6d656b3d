"""GPT-2 XL, 1.56 billion parameters and 18.7 GB of training state, from disk in a process that may have 4 GB.

The limit is the kernel's: a cgroup of its own (page cache counts in it too) where one can be made, else RLIMIT_DATA.
The model is GPT-2 XL's with a context of 256 instead of 1,024: the same parameters (but for 1.2 million positions), and
steps that do not take minutes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine_child import BUILD, Child

from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.search import make_plan
from barnraise.spec import preset

LIMIT = 4 * 10**9
RATE = 3e-6  # no warm-up here: at 2e-5 the first step overshoots and the second loss is 1.5 higher
PLANNED = 34 * 10**8  # the rest is the program's own: torch, Python
CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def confined(limit: int) -> Iterator[tuple[list[str], int | None, str]]:
    """(a command to put before another, so that it may have `limit` bytes; the RLIMIT_DATA to set where that is not
    possible; how it is called)"""
    for folder, files in (
        (CGROUPS / "memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),
        (CGROUPS, ("memory.max",)),
    ):
        group = folder / f"barnraise-xl-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / files[0]).exists():  # a cgroup, and not one of memory
                continue
            for name in files:
                if (group / name).exists():
                    (group / name).write_text(str(limit))
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
            yield (
                ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"],
                None,
                f"cgroup {files[0]}",
            )
            return
        finally:
            group.rmdir()
    yield [], limit, "RLIMIT_DATA"


def measure(hardware: Hardware, quick: bool = False) -> dict:
    """{"steps", "loss_first", "loss_last", "peak_mb", …}; {"why"} where the disk has no room."""
    name, context, sequences, steps = (
        ("gpt2-774m", 128, 1, 2) if quick else ("gpt2-1.5b", 256, 2, 3)
    )
    model = replace(preset(name), context=context)
    limits = Limits(memory=PLANNED, crash_safety="restart")
    need = make_plan(replace(hardware, disk=10**15), model, limits, sequences).disk_bytes
    if hardware.disk * 0.95 < need:
        why = f"{BUILD} has {hardware.disk / 1e9:,.0f} GB free; {name} needs {need / 1e9:,.0f} GB there"
        print(f"  not measured: {why}")
        return {"why": why}
    plan = make_plan(hardware, model, limits, sequences)
    with (
        confined(LIMIT) as (through, data_limit, how),
        Child(plan, through=through, data_limit=data_limit, rate=RATE) as child,
    ):
        tokens = sequences * model.context
        print(
            f"  {model.parameters / 1e9:.2f} B parameters, {tokens:,} tokens a step, {LIMIT / 1e9:g} GB by {how}"
        )
        print(
            f"  plan: {plan.host_bytes / 1e9:.2f} GB of memory, {plan.disk_bytes / 1e9:.1f} GB of disk",
            end="",
        )
        print(
            f", {plan.step_seconds:.0f} s a step ({plan.bottleneck}); begun in {child.begun['seconds']:.0f} s",
            flush=True,
        )
        losses, seconds = [], []
        for step in range(steps):
            found = child.ask("steps", count=1)
            losses += found["losses"]
            seconds += found["seconds"]
            print(f"  step {step + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s", flush=True)
        peak = child.ask("peak")["resident"]
    return {
        "steps": steps, "loss_first": round(losses[0], 4), "loss_last": round(losses[-1], 4),
        "peak_mb": round(peak / 1e6, 1), "limit_mb": LIMIT / 1e6, "limit": how, "parameters": model.parameters,
        "tokens_a_step": tokens, "seconds": [round(s, 1) for s in seconds], "predicted_seconds": round(plan.step_seconds, 1),
    }  # fmt: skip
