"""Measured peaks of each tier against what the plan said before anything was allocated.

For each plan one child counts to the byte: what the arenas hold, and the most that torch (and, while trading, numpy and
Python) had allocated besides. Another, with nothing watching it, says how large its process became.
"""

from dataclasses import replace

from swap_child import Child

from barnraise.hardware import Hardware
from barnraise.limits import Limits
from barnraise.plan import Plan
from barnraise.planner import make_plan
from barnraise.spec import preset

GB = 10**9


def plans(hardware: Hardware, quick: bool) -> list[tuple[str, Plan]]:
    small, large = (128, 128) if quick else (256, 128)
    wanted = [
        ("gpt2-124m in RAM, graphs kept", "gpt2-124m", small, {}),
        ("gpt2-124m staged from RAM", "gpt2-124m", small, {"device_memory": 1.2}),
        ("gpt2-124m, moments partly on disk", "gpt2-124m", small, {"memory": 1.75}),
        ("gpt2-124m from disk", "gpt2-124m", small, {"memory": 1.15}),
        ("gpt2-355m from disk", "gpt2-355m", large, {"memory": 1.6}),
        ("gpt2-355m staged, from disk", "gpt2-355m", large, {"memory": 1.8, "device_memory": 1.2}),
    ]
    wanted = wanted[3:4] if quick else wanted
    found = []
    for name, model, context, limits in wanted:
        limits = Limits(**{kind: int(size * GB) for kind, size in limits.items()}, crash_safety="restart")
        found.append((name, make_plan(hardware, replace(preset(model), context=context), limits, 2)))
    return found


def measure(hardware: Hardware, quick: bool = False) -> dict:
    """{"worst_over_plan", "worst_under_plan": shares of the plan, "rss_over_plan_mb"}"""
    over, under, rss = [], [], []
    for name, plan in plans(hardware, quick):
        with Child(plan, traced=True) as child:
            child.ask("receive")
            moving = child.ask("allocated", steps=1)
            held, kept = child.begun["held"], moving.pop("kept")
        if plan.staged:
            passes = max(moving.pop("first"), moving.pop("steps"))
            tiers = {
                "device": (held["device"] + passes - kept, plan.device_bytes),
                "host": (held["host"] + max(moving.values()), plan.host_bytes),
            }
        else:
            tiers = {"host": (held["host"] + max(moving.values()), plan.host_bytes)}
        with Child(plan) as child:
            child.ask("receive")
            child.ask("steps", count=2)
            child.ask("trade")
            resident = child.ask("peak")["resident"] - plan.host_bytes - plan.device_bytes
        for tier, (seen, said) in tiers.items():
            over.append((seen - said) / said)
            under.append((said - seen) / said)
            print(f"  {name:32} {tier:6} plan {said / 1e6:8,.1f} MB  measured {seen / 1e6:8,.1f} MB  {over[-1]:+.2%}")
        print(f"  {name:32} process {resident / 1e6:+,.0f} MB beside the plan", flush=True)
        rss.append(resident / 1e6)
    return {
        "worst_over_plan": round(max(over), 5),
        "worst_under_plan": round(max(under), 5),
        "rss_over_plan_mb": round(max(rss), 1),
    }
