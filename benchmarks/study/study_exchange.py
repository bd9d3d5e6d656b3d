"""Measure what the exchange costs in loss and saves in bytes: `make study-exchange`.

Machines are virtual, in one process; codec, anchor, error feedback and schedule are the worker's
own. Each training's result is a line in build/study/results.jsonl: a study that was interrupted
continues where it stopped. The script prints a line when a training ends, then writes the tables
into docs/benchmarks/exchange_study.md and all results into the .jsonl file of the same name, and
prints one JSON object as its last line.

    --known   use the results in that .jsonl file, and train only what it lacks
    --report  train nothing; write the document from the results there are
    --quick   a few minutes; writes nothing into the document

BARNRAISE_STUDY=large studies 32 M parameters, on a GPU (`make study-exchange-cuda`).
"""

import argparse
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import study_report
import torch
from study_baselines import train_diloco, train_parallel
from study_case import Case
from study_model import DEVICE, FOLDER, NAME, prepare_text
from study_peers import train_ours
from study_plan import Results, Stage, StudyPlan

PLANS = {
    "small": StudyPlan(),
    # 32 M parameters, on a GPU: four replicas' step is 16,384 tokens.
    "large": StudyPlan(
        short=4_096_000, long=16_384_000, rates_tried=(5e-4, 1e-3, 2e-3), only_frontier=True
    ),
}
QUICK_PLAN = StudyPlan(short=102_400, long=204_800, quick=True)
TRAINERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "ours": train_ours,
    "diloco": train_diloco,
    "parallel": train_parallel,
    "alone": train_parallel,
}


def train(case: Case) -> dict[str, Any]:
    """Train a case and return its result, as it is stored."""
    started = time.perf_counter()
    result = TRAINERS[case.kind](case)
    return {
        "case": asdict(case),
        **result,
        "seconds": round(time.perf_counter() - started, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def start_process() -> None:
    """Give a process one thread, and let it end with the study, whatever ends that."""
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.set_float32_matmul_precision("high")
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Wait for the study's end, then end this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def read_results(*paths: Path) -> Results:
    """Read every whole line of this version; the other trainings are repeated."""
    results = []
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                result = json.loads(line)
                Case.from_dict(result["case"])
            except (ValueError, TypeError):
                print(f"not a result of this version: {line[:60]}…")
            else:
                results.append(result)
    return Results(results)


def train_cases(
    pool: Executor, cases: list[Case], at_once: int, end: float, on_result: Callable[[dict], None]
) -> None:
    """Train cases in the pool's processes.

    Args:
        pool: the processes.
        cases: what to train, in this order.
        at_once: how many to train at a time.
        end: the monotonic time from which on no training begins.
        on_result: receives each result when it is there.
    """
    waiting = list(cases)
    running: set[Future] = set()
    while running or (waiting and time.monotonic() < end):
        while waiting and len(running) < at_once and time.monotonic() < end:
            running.add(pool.submit(train, waiting.pop(0)))
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            on_result(future.result())


def run_stages(
    stages: Sequence[Stage], results: Results, path: Path, arguments: argparse.Namespace
) -> None:
    """Train what the stages lack, and append each result to a file."""
    end = time.monotonic() + 60 * arguments.minutes

    def store_result(result: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        results.add(result)
        case = Case.from_dict(result["case"])
        print(f"  {result['loss']}  {result['seconds']:5.0f} s  {case}", flush=True)

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context, start_process) as pool:
        for stage in stages:
            cases = dict.fromkeys(stage(results))
            missing = [case for case in cases if not results.has(case)]
            train_cases(pool, missing, arguments.processes, end, store_result)


def parse_arguments(description: str) -> argparse.Namespace:
    """Parse the command line of a study."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a few minutes, no document")
    parser.add_argument(
        "--known", action="store_true", help="use the document's results, train only what they lack"
    )
    parser.add_argument(
        "--report", action="store_true", help="train nothing: write the document from the results"
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no training after so many"
    )
    return parser.parse_args()


def main() -> None:
    """Train what is missing and write the report."""
    arguments = parse_arguments(
        "Measure what the exchange costs in loss, and what it saves in bytes."
    )
    plan = QUICK_PLAN if arguments.quick else PLANS[NAME]
    path = FOLDER / f"{NAME}-{'quick' if arguments.quick else 'results'}.jsonl"
    prepare_text()
    if arguments.quick:
        path.unlink(missing_ok=True)
    documented = [study_report.RESULTS] if arguments.known or arguments.report else []
    results = read_results(*documented, path)
    if not arguments.report:
        run_stages(plan.stages(), results, path, arguments)
    if not arguments.quick:
        study_report.write_document(plan, results)
    print(json.dumps(study_report.compute_figures(plan, results)))


if __name__ == "__main__":
    main()
