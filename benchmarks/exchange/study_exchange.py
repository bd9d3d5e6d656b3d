"""What the exchange costs in loss, and saves in bytes: `make study-exchange`, docs/benchmarks/exchange_study.md.

Machines are virtual, in one process; codec, anchor, feedback and schedule are the worker's own. Each training's result
is a line in build/study/results.jsonl: a study that was ended goes on where it stopped. Prints a line as each training
ends, then writes the document with what there is, its results beside it, and one JSON object as its last line.
`--known`: with the results that lie beside the document, so that only what they lack is trained. `--quick`: a few
minutes, of which nothing is written into the document. `--report`: the document from what there is, here and beside it.
BARNRAISE_STUDY=large: 32 M parameters against what they are held against, for a GPU (`make study-exchange-cuda`).
"""

import argparse
import json
import multiprocessing
import os
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

import study_report
import torch
from study_baselines import diloco, parallel
from study_case import Case
from study_model import DEVICE, FOLDER, NAME, prepare_text
from study_peers import ours
from study_plan import Plan, Results

# 30 M parameters and more, on a GPU: a step of each of four is 16,384 tokens.
PLANS = {
    "small": Plan(),
    "large": Plan(short=4_096_000, long=16_384_000, rates_tried=(5e-4, 1e-3, 2e-3), compared=True),
}
KINDS = {"ours": ours, "diloco": diloco, "parallel": parallel, "alone": parallel}


def train(case: Case) -> dict:
    begun = time.perf_counter()
    found = KINDS[case.kind](case)
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "case": asdict(case),
        **found,
        "seconds": seconds,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def begin() -> None:
    """Of each process: one thread, and an end with the study's own, whatever ended that."""
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.set_float32_matmul_precision("high")
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def read(*paths: Path) -> Results:
    """Every whole line; one that a kill cut short, or of another version, is made again."""
    lines = []
    for text in [line for path in paths if path.exists() for line in path.read_text().splitlines()]:
        try:
            line = json.loads(text)
            Case.read(line["case"])
        except (ValueError, TypeError):
            print(f"not a result of this version: {text[:60]}…")
        else:
            lines.append(line)
    return Results(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What the exchange costs in loss, and what it saves in bytes."
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--known", action="store_true", help="what lies beside the document is not trained again"
    )
    parser.add_argument(
        "--report", action="store_true", help="no training: the document from what there is"
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no training after so many"
    )
    asked = parser.parse_args()
    plan = Plan(short=102_400, long=204_800, quick=True) if asked.quick else PLANS[NAME]
    path = FOLDER / f"{NAME}-{'quick' if asked.quick else 'results'}.jsonl"
    prepare_text()
    if asked.quick:
        path.unlink(missing_ok=True)
    kept = [study_report.RESULTS] if asked.known or asked.report else []
    found, end = read(*kept, path), time.monotonic() + 60 * asked.minutes
    if not asked.report:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(asked.processes, spawn, begin) as pool:
            for stage in plan.stages():
                missing = [case for case in dict.fromkeys(stage(found)) if not found.has(case)]
                run(pool, missing, asked.processes, found, path, end)
    if not asked.quick:
        study_report.write(plan, found)
    print(json.dumps(study_report.figures(plan, found)))


def run(
    pool: Executor, missing: list[Case], at_once: int, found: Results, path: Path, end: float
) -> None:
    """Trains what is missing, a line each; begins nothing once `end` has come."""
    going: set[Future] = set()
    while going or (missing and time.monotonic() < end):
        while missing and len(going) < at_once and time.monotonic() < end:
            going.add(pool.submit(train, missing.pop(0)))
        done, going = wait(going, return_when=FIRST_COMPLETED)
        for line in (each.result() for each in done):
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            found.add(line)
            print(
                f"  {line['loss']}  {line['seconds']:5.0f} s  {Case.read(line['case'])}", flush=True
            )


if __name__ == "__main__":
    main()
