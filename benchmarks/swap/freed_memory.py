"""Measure what it costs to return freed memory: `python benchmarks/swap/freed_memory.py`.

Two engines with one plan take steps in turns: glibc retains what the first one frees, and returns
large blocks of the second one to the system. The script prints both medians of seconds and how much
larger than the plan each process became, then one JSON object as its last line. It takes some four
minutes on two cores and 9 GB of RAM.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from engine_child import Child, measure_in_turns

from barnraise.planning.limits import UNLIMITED, Limits
from barnraise.planning.search import make_plan
from barnraise.spec import preset
from barnraise.swap.hardware_probe import probe

# Models, tokens of context, sequences of a step, and bytes of memory (None: as many as there are).
CASES = (
    ("gpt-mini", 512, 8, None),
    ("gpt2-124m", 512, 2, None),
    ("gpt2-124m", 512, 2, 1_300_000_000),
)
STEPS = 7


def main() -> None:
    """Measure every case, and print its row."""
    with tempfile.TemporaryDirectory() as folder:
        hardware = probe(Path(folder), "cpu")
    rows = []
    for name, context, sequences, memory in CASES:
        limits = Limits(memory=memory, disk_writes_per_day=UNLIMITED, crash_safety="restart")
        plan = make_plan(hardware, replace(preset(name), context=context), limits, sequences)
        with Child(plan) as retaining, Child(plan) as returning:
            retaining.request("retain_freed_memory", retain=True)
            returning.request("retain_freed_memory", retain=False)
            retained, returned = measure_in_turns([retaining, returning], STEPS)
            over_plan = [
                round((child.request("peak")["resident"] - plan.host_bytes) / 1e6)
                for child in (retaining, returning)
            ]
        row = {
            "model": name,
            "on_disk": plan.on_disk,
            "seconds": [round(retained, 3), round(returned, 3)],
            "retained_over_returned": round(retained / returned, 3),
            "process_over_plan_mb": over_plan,
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
