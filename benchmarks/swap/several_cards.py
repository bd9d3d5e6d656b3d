"""Measure one card that is used twice, and two cards; for gpu_first.py.

    RANK=0 WORLD_SIZE=2 … python benchmarks/swap/several_cards.py '{"model": …}'

is one of two ranks of plain FSDP2, which the second part starts. Without a GPU, the devices are
windows of RAM and the ranks gloo processes: that shows that the program runs.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

Row = dict[str, Any]
DEALS = ((1, 1), (2, 1), (1, 1, 1))
RANKS = 2


def compare_one_card_twice(plan: Any, steps: int) -> Iterator[Row]:
    """Compare the bits of several engines' devices, all on one card, with the deal done in turns.

    Args:
        plan: of one device, with the state in RAM.
        steps: of each run.
    """
    import bitwise
    from dealt_reference import run_one_after_the_other_under

    from barnraise.planning.plan import DeviceShare
    from barnraise.swap.device import SAME_CARD, choose_device

    os.environ[SAME_CARD] = "1"
    try:
        choice = choose_device(f"{plan.device},{plan.device}")
    finally:
        del os.environ[SAME_CARD]
    yield {"devices": (choice.name, *choice.others), "note": choice.note}
    for counts in DEALS:
        devices = tuple(DeviceShare(plan.device, count) for count in counts)
        several = replace(plan, devices=devices, micro_batches=sum(counts))
        runs = [bitwise.run_plan(several, steps) for _ in range(2)]
        expected = run_one_after_the_other_under(plan, counts, steps)
        one = bitwise.run_plan(replace(plan, micro_batches=sum(counts)), steps)
        gaps = [abs(a - b) / b for a, b in zip(runs[0][0], one[0], strict=True)]
        yield {
            "counts": counts,
            "same_bits": bitwise.equal_bits(runs[0], expected),
            "again": bitwise.equal_bits(*runs),
            "loss_gap": max(gaps),
        }


def measure_two_cards(
    hardware: Any, model: Any, sequences: int, steps: int, open_engine: Callable[..., Any]
) -> Iterator[Row]:
    """Measure tokens/s of one card, of two over one copy, of ranks, and of plain FSDP2.

    Args:
        hardware: the machine; its second card is in `others`.
        model: the model's dimensions.
        sequences: of a step.
        steps: of each way; the first is the warm-up.
        open_engine: opens an engine for a plan, on a group of ranks if there is one.
    """
    from barnraise.planning.limits import Limits
    from barnraise.planning.rank_plans import plan_ranks
    from barnraise.planning.search import make_plan
    from barnraise.swap.sharded.rank_group import RankGroup

    limits = Limits(device_memory=10**9) if hardware.device == "cpu" else Limits()
    plans = {
        "one card": make_plan(replace(hardware, others=()), model, limits, sequences),
        "two cards": make_plan(hardware, model, limits, sequences),
        "ranks": plan_ranks(hardware, model, limits, sequences),
    }
    for way, plan in plans.items():
        row: Row = {"way": way, "predicted": plan.tokens_per_second, "devices": len(plan.devices)}
        try:
            if plan.ranks:
                with closing(RankGroup.start(plan.ranks)) as group:
                    row |= _train(plan, steps, open_engine(plan, None, group))
            else:
                row |= _train(plan, steps, open_engine(plan, None))
        except Exception as error:
            row["failure"] = str(error).splitlines()[0]
        yield row
    for offloads in (False, True):
        way = "plain FSDP2 with offload" if offloads else "plain FSDP2"
        training = [hardware.device, sequences, steps, offloads]
        yield {"way": way, **_measure_plain_ranks([asdict(model), *training])}


def _train(plan: Any, steps: int, engine: Any) -> Row:
    """Train on the same text under each plan, and close the engine."""
    seconds: list[float] = []
    losses: list[float] = []
    with closing(engine):
        for number in range(steps):
            generator = torch.Generator().manual_seed(number)
            shape = plan.step_tokens // plan.model.context, plan.model.context + 1
            batch = torch.randint(plan.model.vocabulary, shape, generator=generator)
            started = time.perf_counter()
            losses.append(engine.step(list(batch.split(plan.sequences)), position=number + 1).loss)
            seconds.append(time.perf_counter() - started)
    return {
        "tokens_per_second": plan.step_tokens / median(seconds[1:]),
        "losses": [round(loss, 6) for loss in losses],
    }


def _measure_plain_ranks(training: Sequence[Any]) -> Row:
    """Return what the first of two ranks of plain FSDP2 prints, or why it failed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    paths = os.pathsep.join(path for path in sys.path if path)
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), json.dumps(training)],
            env=os.environ | address | {"RANK": str(rank), "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return {"failure": printed[0].splitlines()[-1:]}
    return json.loads(printed[0].splitlines()[-1])


def run_plain_rank(training: Sequence[Any]) -> Row:
    """Train as one of the ranks, each with a part of a step's sequences."""
    import cuda_baseline

    from barnraise.spec import ModelSpec

    model, device, sequences, steps, offloads = training
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    else:
        torch.set_num_threads(1)
    own = cuda_baseline.GpuTraining(ModelSpec(**model), 1, sequences // RANKS, steps, device)
    row = cuda_baseline.measure("fsdp2" if offloads else "fsdp2 resident", own)
    return {"tokens_per_second": RANKS * row["tokens_per_second"], "seconds": row["seconds"]}


if __name__ == "__main__":
    print(json.dumps(run_plain_rank(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # gloo's threads may outlive the group
