"""The swap engine on a GPU whose memory is capped, beside everything in its memory, FSDP2 and DeepSpeed ZeRO-3 offload:
`make bench-swap-cuda`, or with a bare torch `python benchmarks/swap/bench_swap_cuda.py [--quick] [--model gpt3-1.3b] [--cap 8]`.

GPT-3 1.3B, 2.7B and 6.7B, at micro-batches of 1,024 and 2,048 tokens and steps of 4k, 16k and 64k, with 8, 12 and 24 GB
of GPU memory. What does not fit is refused by the plan, in a sentence. One line a case, then one JSON object.
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
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from engine_child import BUILD, PATHS, Child, ChildError

from barnraise.errors import PlanError
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.search import make_plan
from barnraise.spec import ModelSpec, preset
from barnraise.swap.hardware_probe import probe

GB = 10**9
MODELS = ("gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b")
MICRO_TOKENS, STEP_TOKENS, CAPS = (1024, 2048), (4096, 16384, 65536), (8, 12, 24)
PEERS = ("fsdp2", "deepspeed")
PEER = Path(__file__).with_name("cuda_baseline.py")
PEER_SECONDS = 1800


def ours(
    hardware: Hardware, model: ModelSpec, tokens: int, step: int, cap: int | None, steps: int
) -> dict:
    """Tokens/s with `cap` bytes of GPU memory (None: all), what was predicted, and the most that torch had there."""
    limits = Limits(device_memory=cap, clipping="exact")
    try:
        plan = make_plan(hardware, model, limits, step // model.context, advise=False)
        sequences = tokens // model.context
        plan = replace(plan, sequences=sequences, micro_batches=step // tokens)
        with Child(plan, device_limit=cap) as child:
            child.ask("steps", count=1)
            seconds = median(child.ask("steps", count=steps)["seconds"])
            peak = child.ask("peak")["device"]
    except (PlanError, ChildError) as error:
        return {"why": str(error)}
    return {
        "tokens_per_second": step / seconds,
        "predicted": step / plan.step_seconds,
        "device_gb": peak / 1e9,
    }


def theirs(peer: str, model: str, tokens: int, step: int, cap: int, steps: int) -> dict:
    asked = json.dumps([peer, model, tokens, step // tokens, steps + 1, cap])
    with tempfile.TemporaryFile() as complaint:
        try:
            said = subprocess.run(
                [sys.executable, str(PEER), asked],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)},
                stdout=subprocess.PIPE,
                stderr=complaint,
                timeout=PEER_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"why": f"{peer} was not done after {PEER_SECONDS} seconds"}
        complaint.seek(0)
        lines = complaint.read().decode(errors="replace").strip().splitlines() or [
            f"status {said.returncode}"
        ]
    return json.loads(said.stdout.splitlines()[-1]) if said.returncode == 0 else {"why": lines[-1]}


def cases(
    hardware: Hardware, models: Sequence[str], caps: Sequence[int], quick: bool
) -> list[dict]:
    found, steps, whole = [], 3 if quick else 5, {}
    sizes = [(1024, 16384)] if quick else list(itertools.product(MICRO_TOKENS, STEP_TOKENS))
    for name, (tokens, step) in itertools.product(models, sizes):
        model = replace(preset(name), context=min(tokens, preset(name).context))
        whole[name, tokens, step] = show(
            ours(hardware, model, tokens, step, None, steps), name, tokens, step, "memory"
        )
        for cap in caps:
            row = {"model": name, "micro_tokens": tokens, "step_tokens": step, "cap_gb": cap}
            row["in_memory"] = whole[name, tokens, step]
            row["ours"] = show(
                ours(hardware, model, tokens, step, cap * GB, steps),
                name,
                tokens,
                step,
                f"{cap} GB",
            )
            for peer in PEERS:
                row[peer] = show(
                    theirs(peer, name, tokens, step, cap * GB, steps),
                    name,
                    tokens,
                    step,
                    f"{peer} {cap}",
                )
            found.append(row)
    return found


def show(seen: dict, name: str, tokens: int, step: int, what: str) -> dict:
    text = (
        f"{seen['tokens_per_second']:10,.0f} tokens/s"
        if "tokens_per_second" in seen
        else seen["why"]
    )
    print(f"{name} {tokens:>5,} of {step:>6,}  {what:14} {text}", flush=True)
    return seen


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument(
        "--quick", action="store_true", help="micro-batches of 1,024 tokens, steps of 16k"
    )
    asked.add_argument("--model", choices=MODELS, action="append")
    asked.add_argument("--cap", type=int, action="append", help="GB of GPU memory")
    given = asked.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA GPU on this machine, so nothing was measured")
    hardware = probe(BUILD, "cuda")
    rows = cases(hardware, given.model or MODELS, given.cap or CAPS, given.quick)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(
        json.dumps(
            {"machine": f"{hardware.name}, torch {torch.__version__}", "date": date, "cases": rows}
        )
    )


if __name__ == "__main__":
    main()
