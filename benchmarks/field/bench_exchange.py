"""Measure the exchange against the systems that people would otherwise use: `make bench-exchange`.

Four workers in four network namespaces train one small GPT on lines that are scaled to this
machine's arithmetic (`links.py`). See docs/benchmarks/exchange.md. The script prints a line for
each measurement, and one JSON object as its last line. `--quick`: a small version of all.

Exit code 2: something that the benchmark needs is missing; one sentence says what.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

import run_text
import torch
from child_processes import ChildProcesses
from field_bench import EXTERNAL, LINES, WORKERS, FieldBench
from field_cells import FieldRunner
from field_environment import InstallError, install_systems
from field_extent import FULL, QUICK, Extent
from field_findings import Findings, summarise
from field_network import FieldNetwork, NamespaceError
from field_plots import draw_plots
from joined_run import MIRROR
from links import LinkError
from measurements.churn import measure_churn
from measurements.equal_work import measure_equal_work
from measurements.model_errors import measure_runtime_model
from measurements.pipelines import measure_pipelines
from measurements.relaying import measure_relaying
from measurements.time_to_loss import measure_loss
from measurements.unequal_speeds import measure_unequal_speeds
from measurements.unscaled_lines import measure_unscaled
from measurements.utilisation import measure_utilisation

from barnraise.planning.lines import HOME_LINE

BUILD = Path(__file__).resolve().parents[2] / "build" / "field"
# The parts of the benchmark, in order.
PARTS: dict[str, Callable[[FieldBench], None]] = {
    "pipelines": measure_pipelines,
    "loss": measure_loss,
    "equal": measure_equal_work,
    "model": measure_runtime_model,
    "utilisation": measure_utilisation,
    "unequal": measure_unequal_speeds,
    "churn": measure_churn,
    "unscaled": measure_unscaled,
}
RELAY = "relay"  # a part with a network of its own, and without external systems


def prepare_text(folder: Path) -> None:
    """Write the text that all systems train on, and its manifest."""
    signed = run_text.prepare_text(folder / "text", MIRROR)
    (folder / "manifest.json").write_text(signed.body)
    (folder / "signed_manifest.json").write_text(signed.model_dump_json())


def run_benchmark(
    extent: Extent,
    only: list[str],
    save: Callable[[Findings], None] = lambda findings: None,
    delay_seconds: float = HOME_LINE.delay_seconds,
) -> Findings:
    """Measure everything, or what is named.

    Args:
        extent: how much is measured.
        only: names of the parts; empty: all.
        save: called with the findings after each part.
        delay_seconds: one way between two workers. The runtime model is told the home line's.

    Raises:
        NamespaceError: There are no network namespaces for this process.
        InstallError: An external system cannot be installed.
        LinkError: The machine is too busy to be measured.
    """
    folder = BUILD / f"run.{os.getpid()}"
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        network = FieldNetwork(WORKERS, delay_seconds, cleanup)
        ChildProcesses(BUILD, cleanup)  # ends every process, also after Ctrl-C
        network.create()
        python = install_systems(BUILD / "venv")
        folder.mkdir(parents=True)
        prepare_text(folder)
        runner = FieldRunner(folder, network, dict.fromkeys(EXTERNAL, python), cleanup)
        bench = FieldBench(runner, extent)
        bench.calibrate()
        seconds = bench.findings.machine.setdefault("seconds", {})
        for name, measure in PARTS.items():
            if not only or name in only:
                started = time.monotonic()
                measure(bench)
                seconds[name] = round(time.monotonic() - started, 1)
                save(bench.findings)
    return bench.findings


def run_relay() -> dict[str, Any]:
    """Measure what a fast line saves slow ones, in a folder that is removed."""
    folder = BUILD / f"relay.{os.getpid()}"
    try:
        return measure_relaying(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Parse the command line, measure, and print the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small version of all")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[*PARTS, RELAY],
        help="one part, several times; relay: alone, and only where it is named",
    )
    parser.add_argument("--line", action="append", choices=LINES, help="for time to a loss")
    parser.add_argument(
        "--ours", action="store_true", help="time to a loss of our worker only, without the others"
    )
    parser.add_argument(
        "--without-delay",
        action="store_true",
        help="lines that delay nothing; for --only pipelines",
    )
    parser.add_argument("--output", type=Path, default=BUILD / "findings.json")
    parser.add_argument("--docs", action="store_true", help="write the plots of the document")
    arguments = parser.parse_args()
    if arguments.ours and arguments.only != ["loss"]:
        parser.error("--ours needs --only loss: all other parts measure what they compare with")
    if arguments.without_delay and arguments.only != ["pipelines"]:
        parser.error("--without-delay needs --only pipelines: all other parts assume the delay")
    if RELAY in arguments.only and arguments.only != [RELAY]:
        parser.error("--only relay has a network of its own: measure it alone")
    delay_seconds = 0.0 if arguments.without_delay else HOME_LINE.delay_seconds
    torch.set_num_threads(1)
    extent = QUICK if arguments.quick else FULL
    if arguments.line:
        extent = replace(extent, loss_lines=tuple(arguments.line))
    extent = replace(extent, only_ours=arguments.ours)
    started = time.monotonic()

    def save(findings: Findings) -> None:
        findings.machine["minutes"] = round((time.monotonic() - started) / 60, 1)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(asdict(findings), indent=1))

    try:
        if arguments.only == [RELAY]:
            print(json.dumps(run_relay()))
            return
        findings = run_benchmark(extent, arguments.only, save, delay_seconds)
    except (NamespaceError, InstallError, LinkError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if arguments.docs:
        draw_plots(findings, extent.target_loss)
    print(json.dumps(summarise(findings)))


if __name__ == "__main__":
    main()
