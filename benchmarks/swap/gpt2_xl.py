"""Train GPT-2 XL from disk in a process that may use 4 GB of memory.

It has 1.56 billion parameters and 18.7 GB of training state. The kernel enforces the limit: by a
cgroup, in which the page cache counts too, where one can be created, otherwise by RLIMIT_DATA. The
context is 256 instead of 1,024 tokens: the same parameters but for 1.2 million positions, and steps
that do not take minutes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_child import BUILD, Child

from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import UNLIMITED, Limits
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.spec import preset

LIMIT_BYTES = 4 * 10**9
# There is no warm-up here: at 2e-5 the first step overshoots, and the second loss is 1.5 higher.
LEARNING_RATE = 3e-6
PLANNED_BYTES = 34 * 10**8  # the rest is for torch and Python themselves
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Confinement:
    """How a child process is kept within its memory."""

    name: str
    command_prefix: tuple[str, ...] = ()  # enters the cgroup
    data_limit: int | None = None  # for RLIMIT_DATA, where there is no cgroup


@contextmanager
def confine(limit: int) -> Iterator[Confinement]:
    """Limit the memory of a child process to `limit` bytes, by a cgroup if possible."""
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
            if not (group / files[0]).exists():
                continue  # This cgroup does not control memory.
            for name in files:
                if (group / name).exists():
                    (group / name).write_text(str(limit))
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
            enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
            yield Confinement(f"cgroup {files[0]}", ("sh", "-c", enter, "sh"))
            return
        finally:
            group.rmdir()
    yield Confinement("RLIMIT_DATA", data_limit=limit)


def measure(hardware: Hardware, quick: bool = False) -> dict[str, Any]:
    """Train a few steps within the limit.

    Args:
        hardware: this machine.
        quick: train a smaller model.

    Returns:
        {"steps", "loss_first", "loss_last", "peak_mb", …}; {"why"} where the disk has no room.
    """
    name, context, sequences, steps = (
        ("gpt2-774m", 128, 1, 2) if quick else ("gpt2-1.5b", 256, 2, 3)
    )
    model = replace(preset(name), context=context)
    limits = Limits(memory=PLANNED_BYTES, crash_safety="restart", disk_writes_per_day=UNLIMITED)
    needed = make_plan(replace(hardware, disk=10**15), model, limits, sequences).disk_bytes
    if hardware.disk * 0.95 < needed:
        why = (
            f"{BUILD} has {hardware.disk / 1e9:,.0f} GB free; "
            f"{name} needs {needed / 1e9:,.0f} GB there"
        )
        print(f"  not measured: {why}")
        return {"why": why}
    plan = make_plan(hardware, model, limits, sequences)
    losses: list[float] = []
    seconds: list[float] = []
    with (
        confine(LIMIT_BYTES) as confinement,
        Child(
            plan,
            command_prefix=confinement.command_prefix,
            data_limit=confinement.data_limit,
            learning_rate=LEARNING_RATE,
        ) as child,
    ):
        print_plan(plan, confinement, child.opened["seconds"])
        for step in range(steps):
            result = child.request("steps", count=1)
            losses += result["losses"]
            seconds += result["seconds"]
            print(f"  step {step + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s", flush=True)
        peak = child.request("peak")["resident"]
    return {
        "steps": steps,
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "peak_mb": round(peak / 1e6, 1),
        "limit_mb": LIMIT_BYTES / 1e6,
        "limit": confinement.name,
        "parameters": model.parameters,
        "tokens_a_step": sequences * model.context,
        "seconds": [round(step_seconds, 1) for step_seconds in seconds],
        "predicted_seconds": round(plan.step_seconds, 1),
    }


def print_plan(plan: Plan, confinement: Confinement, opening_seconds: float) -> None:
    """Print what is trained, within which limit, and what the plan predicts."""
    tokens = plan.sequences * plan.micro_batches * plan.model.context
    print(
        f"  {plan.model.parameters / 1e9:.2f} B parameters, {tokens:,} tokens a step, "
        f"{LIMIT_BYTES / 1e9:g} GB by {confinement.name}"
    )
    print(
        f"  plan: {plan.host_bytes / 1e9:.2f} GB of memory, {plan.disk_bytes / 1e9:.1f} GB of "
        f"disk, {plan.step_seconds:.0f} s a step ({plan.bottleneck}); "
        f"opened in {opening_seconds:.0f} s",
        flush=True,
    )
