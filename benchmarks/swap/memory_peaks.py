"""Compare the measured peaks of each tier with the plan's, computed before any allocation.

For each plan one child counts to the byte: what the arenas hold, and the most that torch (and,
during the exchange, numpy and Python) had allocated besides. Another child runs unobserved and
reports how large its process became.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from engine_child import BUILD, Child, ReceivedPayloads

from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import UNLIMITED, Limits
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.spec import ModelSpec, preset


@dataclass(frozen=True)
class PlannedCase:
    """A model and the memory, in bytes, that its plan may use on each tier."""

    name: str
    model: str
    context: int
    memory: int | None = None
    device_memory: int | None = None


CASES = (
    PlannedCase("gpt2-124m in RAM, graphs kept", "gpt2-124m", 256),
    PlannedCase("gpt2-124m staged from RAM", "gpt2-124m", 128, device_memory=1_200_000_000),
    PlannedCase("gpt2-124m, moments partly on disk", "gpt2-124m", 128, memory=1_750_000_000),
    PlannedCase("gpt2-124m from disk", "gpt2-124m", 128, memory=1_150_000_000),
    PlannedCase(
        "gpt2-124m staged, from disk",
        "gpt2-124m",
        128,
        memory=1_150_000_000,
        device_memory=1_200_000_000,
    ),
    PlannedCase("smollm2-135m in RAM", "smollm2-135m", 256),
    PlannedCase("smollm2-135m from disk", "smollm2-135m", 128, memory=1_150_000_000),
)
QUICK_CASES = (
    PlannedCase("gpt-mini from disk", "gpt-mini", 128, memory=130_000_000),
    PlannedCase("llama-mini from disk", "llama-mini", 128, memory=130_000_000),
)


def make_plans(hardware: Hardware, quick: bool) -> list[tuple[str, Plan]]:
    """Return the plans to measure, with their names."""
    plans = []
    for case in QUICK_CASES if quick else CASES:
        limits = Limits(
            memory=case.memory,
            device_memory=case.device_memory,
            disk_writes_per_day=UNLIMITED,
            crash_safety="restart",
        )
        model = replace(preset(case.model), context=case.context)
        plans.append((case.name, make_plan(hardware, model, limits, 2)))
    return plans


def write_update(model: ModelSpec, parent: Path) -> Path:
    """Write another machine's update for a model, once, and return its folder."""
    folder = parent / f"{model.architecture}-{model.width}-{model.context}"
    if not folder.exists():
        folder.mkdir()
        ReceivedPayloads(folder, [fragment.size for fragment in model.fragments()]).write()
    return folder


def count_bytes(plan: Plan, update: Path) -> dict[str, int]:
    """Count the most bytes held at once on each tier, {tier: bytes}."""
    with Child(plan, traced=True) as child:
        peaks = child.request("allocated", steps=1, update=update)
        held = child.opened["held"]
    kept = peaks.pop("kept")
    if not plan.staged:
        return {"host": held["host"] + max(peaks.values())}
    steps_peak = max(peaks.pop("first"), peaks.pop("steps"))
    return {
        "device": held["device"] + steps_peak - kept,
        "host": held["host"] + max(peaks.values()),
    }


def measure_process(plan: Plan, update: Path) -> int:
    """Return the largest resident set of an unobserved process, in bytes."""
    with Child(plan) as child:
        child.request("steps", count=2)
        child.request("trade", update=update)
        return child.request("peak")["resident"]


def measure(hardware: Hardware, quick: bool = False) -> dict[str, float]:
    """Measure all plans.

    A plan's two children run side by side, as bytes are measured and not seconds.

    Args:
        hardware: this machine.
        quick: measure one small model only.

    Returns:
        "worst_over_plan" and "worst_under_plan" as fractions of the plan, and "rss_over_plan_mb".
    """
    errors: list[float] = []
    process_excess: list[float] = []
    BUILD.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="updates-", dir=BUILD) as updates,
        ThreadPoolExecutor(2) as pool,
    ):
        for name, plan in make_plans(hardware, quick):
            update = write_update(plan.model, Path(updates))
            counted = pool.submit(count_bytes, plan, update)
            resident = pool.submit(measure_process, plan, update)
            planned = {"device": plan.device_bytes, "host": plan.host_bytes}
            for tier, measured in counted.result().items():
                errors.append((measured - planned[tier]) / planned[tier])
                print(
                    f"  {name:32} {tier:6} plan {planned[tier] / 1e6:8,.1f} MB"
                    f"  measured {measured / 1e6:8,.1f} MB  {errors[-1]:+.2%}"
                )
            process_excess.append((resident.result() - sum(planned.values())) / 1e6)
            print(f"  {name:32} process {process_excess[-1]:+,.0f} MB over the plan", flush=True)
    return {
        "worst_over_plan": round(max(errors), 5),
        "worst_under_plan": round(-min(errors), 5),
        "rss_over_plan_mb": round(max(process_excess), 1),
    }
