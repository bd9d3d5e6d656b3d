"""Measure the swap engine on a GPU whose memory is capped: `make bench-swap-cuda`.

With a bare torch: `python benchmarks/swap/bench_swap_cuda.py --model gpt3-1.3b --cap 8`.

It is compared with everything in the GPU's memory, with FSDP2 and with DeepSpeed ZeRO-3, both with
CPU offload: GPT-3 1.3B, 2.7B and 6.7B, at micro-batches of 1,024 and 2,048 tokens and steps of 4k,
16k and 64k, with 8, 12 and 24 GB of GPU memory. The planner refuses what does not fit, with a
reason. The script prints one line for each case and then one JSON object.
"""

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_child import BUILD, PATHS, Child, ChildError

from barnraise.errors import PlanError
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.search import make_plan
from barnraise.spec import preset
from barnraise.swap.hardware_probe import probe

GB = 10**9
MODELS = ("gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b")
MICRO_TOKENS = (1024, 2048)
STEP_TOKENS = (4096, 16384, 65536)
CAPS = (8, 12, 24)  # GB
BASELINES = ("fsdp2", "deepspeed")
BASELINE_PROGRAM = Path(__file__).with_name("cuda_baseline.py")
BASELINE_SECONDS = 1800


@dataclass(frozen=True)
class Workload:
    """What is trained: a preset, tokens of a micro-batch and of a step, and measured steps."""

    model: str
    micro_tokens: int
    step_tokens: int
    steps: int


def measure_engine(hardware: Hardware, work: Workload, cap: int | None) -> dict[str, Any]:
    """Measure the swap engine with `cap` bytes of GPU memory, or all of it.

    Returns:
        Measured and predicted tokens/s and the peak of torch's GPU memory; {"why"} if refused.
    """
    model = preset(work.model)
    model = replace(model, context=min(work.micro_tokens, model.context))
    limits = Limits(device_memory=cap, clipping="exact")
    try:
        step_sequences = work.step_tokens // model.context
        plan = make_plan(hardware, model, limits, step_sequences, advise=False)
        plan = replace(
            plan,
            sequences=work.micro_tokens // model.context,
            micro_batches=work.step_tokens // work.micro_tokens,
        )
        with Child(plan, device_limit=cap) as child:
            child.request("steps", count=1)
            seconds = median(child.request("steps", count=work.steps)["seconds"])
            peak = child.request("peak")["device"]
    except (PlanError, ChildError) as error:
        return {"why": str(error)}
    return {
        "tokens_per_second": work.step_tokens / seconds,
        "predicted": work.step_tokens / plan.step_seconds,
        "device_gb": peak / 1e9,
    }


def measure_baseline(baseline: str, work: Workload, cap: int) -> dict[str, Any]:
    """Measure FSDP2 or DeepSpeed in a child process; {"why"} if it fails."""
    micro_batches = work.step_tokens // work.micro_tokens
    arguments = json.dumps(
        [baseline, work.model, work.micro_tokens, micro_batches, work.steps + 1, cap]
    )
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.run(
                [sys.executable, str(BASELINE_PROGRAM), arguments],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)},
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=BASELINE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"why": f"{baseline} was not done after {BASELINE_SECONDS} seconds"}
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    return {"why": lines[-1] if lines else f"status {process.returncode}"}


def measure_cases(
    hardware: Hardware, models: Sequence[str], caps: Sequence[int], quick: bool
) -> list[dict[str, Any]]:
    """Measure every model, size and cap with every system."""
    rows = []
    sizes = [(1024, 16384)] if quick else list(itertools.product(MICRO_TOKENS, STEP_TOKENS))
    for model, (micro_tokens, step_tokens) in itertools.product(models, sizes):
        work = Workload(model, micro_tokens, step_tokens, steps=3 if quick else 5)
        in_memory = measure_engine(hardware, work, None)
        print_result(in_memory, work, "memory")
        for cap in caps:
            row: dict[str, Any] = {
                "model": model,
                "micro_tokens": micro_tokens,
                "step_tokens": step_tokens,
                "cap_gb": cap,
                "in_memory": in_memory,
                "ours": measure_engine(hardware, work, cap * GB),
            }
            print_result(row["ours"], work, f"{cap} GB")
            for baseline in BASELINES:
                row[baseline] = measure_baseline(baseline, work, cap * GB)
                print_result(row[baseline], work, f"{baseline} {cap}")
            rows.append(row)
    return rows


def print_result(result: dict[str, Any], work: Workload, label: str) -> None:
    """Print one case's speed, or why there is none."""
    text = result.get("why") or f"{result['tokens_per_second']:10,.0f} tokens/s"
    size = f"{work.micro_tokens:>5,} of {work.step_tokens:>6,}"
    print(f"{work.model} {size}  {label:14} {text}", flush=True)


def main() -> None:
    """Measure the chosen cases on this machine's GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="micro-batches of 1,024 tokens, steps of 16k"
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="repeatable")
    parser.add_argument("--cap", type=int, action="append", help="GB of GPU memory; repeatable")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA GPU on this machine, so nothing was measured")
    hardware = probe(BUILD, "cuda")
    rows = measure_cases(
        hardware, arguments.model or MODELS, arguments.cap or CAPS, arguments.quick
    )
    result = {
        "machine": f"{hardware.name}, torch {torch.__version__}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cases": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
