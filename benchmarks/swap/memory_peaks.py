"""Measured peaks of each tier against what the plan said before anything was allocated.

For each plan one child counts to the byte: what the arenas hold, and the most that torch (and, while trading, numpy and
Python) had allocated besides. Another, with nothing watching it, says how large its process became.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from engine_child import BUILD, Child, Payloads

from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.spec import ModelSpec, preset

GB = 10**9


def plans(hardware: Hardware, quick: bool) -> list[tuple[str, Plan]]:
    wanted = [
        ("gpt2-124m in RAM, graphs kept", "gpt2-124m", 256, {}),
        ("gpt2-124m staged from RAM", "gpt2-124m", 128, {"device_memory": 1.2}),
        ("gpt2-124m, moments partly on disk", "gpt2-124m", 128, {"memory": 1.75}),
        ("gpt2-124m from disk", "gpt2-124m", 128, {"memory": 1.15}),
        ("gpt2-124m staged, from disk", "gpt2-124m", 128, {"memory": 1.15, "device_memory": 1.2}),
    ]
    wanted = [("gpt-mini from disk", "gpt-mini", 128, {"memory": 0.13})] if quick else wanted
    found = []
    for name, model, context, limits in wanted:
        limits = Limits(
            **{kind: int(size * GB) for kind, size in limits.items()}, crash_safety="restart"
        )
        found.append(
            (name, make_plan(hardware, replace(preset(model), context=context), limits, 2))
        )
    return found


def received(model: ModelSpec, parent: Path) -> Path:
    """Another machine's update, as the inbox keeps it on disk: in a folder of its own, one for all plans of a model."""
    folder = parent / f"{model.width}-{model.context}"
    if not folder.exists():
        folder.mkdir()
        Payloads(folder, [fragment.size for fragment in model.fragments()]).write()
    return folder


def counted(plan: Plan, update: Path) -> dict[str, int]:
    """{tier: bytes}: the most that was held at once."""
    with Child(plan, traced=True) as child:
        moving = child.ask("allocated", steps=1, update=update)
        held, kept = child.begun["held"], moving.pop("kept")
    if not plan.staged:
        return {"host": held["host"] + max(moving.values())}
    passes = max(moving.pop("first"), moving.pop("steps"))
    return {"device": held["device"] + passes - kept, "host": held["host"] + max(moving.values())}


def unwatched(plan: Plan, update: Path) -> int:
    """Bytes: the process at its largest."""
    with Child(plan) as child:
        child.ask("steps", count=2)
        child.ask("trade", update=update)
        return child.ask("peak")["resident"]


def measure(hardware: Hardware, quick: bool = False) -> dict:
    """{"worst_over_plan", "worst_under_plan": shares of the plan, "rss_over_plan_mb"}. A plan's two children run side
    by side: it is bytes that are measured, not seconds."""
    over, under, rss = [], [], []
    BUILD.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="updates-", dir=BUILD) as updates,
        ThreadPoolExecutor(2) as both,
    ):
        for name, plan in plans(hardware, quick):
            update = received(plan.model, Path(updates))
            one, other = both.submit(counted, plan, update), both.submit(unwatched, plan, update)
            said = {"device": plan.device_bytes, "host": plan.host_bytes}
            for tier, seen in one.result().items():
                over.append((seen - said[tier]) / said[tier])
                under.append(-over[-1])
                shown = f"plan {said[tier] / 1e6:8,.1f} MB  measured {seen / 1e6:8,.1f} MB  {over[-1]:+.2%}"
                print(f"  {name:32} {tier:6} {shown}")
            rss.append((other.result() - sum(said.values())) / 1e6)
            print(f"  {name:32} process {rss[-1]:+,.0f} MB beside the plan", flush=True)
    return {
        "worst_over_plan": round(max(over), 5),
        "worst_under_plan": round(max(under), 5),
        "rss_over_plan_mb": round(max(rss), 1),
    }
