"""Let three workers train one model: whole on a GPU, staged through it, and on the CPU.

    python benchmarks/drills/drill_gpu.py              # twenty seconds, on the first GPU
    python benchmarks/drills/drill_gpu.py --device cpu # shows that the program runs

The workers are real ones that exchange updates over iroh. At the end all leave, return to the
finished run and compare: they must have the same updates and the same weights, and the weights
must be the initial ones plus all updates, recomputed here. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from child_processes import ChildProcesses
from drill_exchange import QUICK, Drill
from drill_machine import FORK, DrillMachine

from barnraise.planning.hardware import Hardware
from barnraise.spec import ModelSpec
from barnraise.swap.hardware_probe import probe

MODEL = ModelSpec(layers=8, width=256, heads=4, context=128, vocabulary=256)
UPLINK = 12_500_000  # bytes per second: 100 Mb/s
STAGED_BYTES = 960_000_000  # so little that the staged machine keeps training state in RAM
MAX_THREADS = 6  # of the machine that trains on the CPU


def describe(machine: DrillMachine) -> dict[str, Any]:
    """Return what a machine has trained so far."""
    status = machine.status
    numbers = {name: value for name, value in status.items() if isinstance(value, (int, float))}
    return {"plan": status.get("plan"), "loss": machine.loss} | numbers


def run(drill: Drill, hardware: Hardware, seconds: float) -> dict[str, Any]:
    """Train for so many seconds and return what the three machines have done."""
    whole, staged, cpu = machines = [
        drill.add_machine(name) for name in ("whole", "staged", "processor")
    ]
    whole.start(hardware=hardware, uplink=UPLINK)
    staged.start(hardware=hardware, uplink=UPLINK, device_memory=STAGED_BYTES)
    cpu.start(uplink=UPLINK, threads=min(MAX_THREADS, os.cpu_count() or 1))
    drill.children.sleep(seconds)
    trained = {machine.name: describe(machine) for machine in machines}
    print("trained; now all exchange what they have, leave, and compare", flush=True)
    drill.wait_for_updates(machines)
    drill.finish(machines)
    return drill.results | {"hardware": hardware.name, "machines": trained}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Let workers on a GPU and on a CPU train.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training")
    parser.add_argument("--hardware", type=Path, help="a file with the machine's measurements")
    parser.add_argument("--width", type=int, default=MODEL.width, help="of the model")
    return parser.parse_args()


def main() -> None:
    """Run the drill."""
    arguments = parse_arguments()
    FORK.set_forkserver_preload(["drill_worker"])
    with ExitStack() as cleanup:
        folder = Path(
            cleanup.enter_context(
                tempfile.TemporaryDirectory(prefix="barnraise-drill-", ignore_cleanup_errors=True)
            )
        )
        model = replace(MODEL, width=arguments.width)
        cache = arguments.hardware
        hardware = probe(cache.parent if cache else folder, arguments.device, cache)
        print(f"measured: {hardware.name}", flush=True)
        drill = Drill(ChildProcesses(folder, cleanup), folder, QUICK, model, seed=1)
        results = run(drill, hardware, arguments.seconds)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
