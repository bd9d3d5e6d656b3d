"""Train as `barnraise join` does, in a process of its own, without a site: for `bench_worker.py`.

Usage: `worker_child.py HOME STEPS ROUND_STEPS [PORT PEERS_PORT PEERS_KEY]`. The home has the
machine's key and limits. The process ends with the run or on SIGTERM, as the command does. With its
own UDP port, and another machine's port and key, it exchanges updates with that machine.
"""

import json
import logging
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

import torch
from example_hardware import ONE_CORE_MACHINE
from joined_run import MIRROR, Setup, build_joined_run
from run_text import TEXT, prepare_text

from barnraise.cli.join import lower_priority
from barnraise.cli.signals import stop_on_signals
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol.signing import digest
from barnraise.spec import ModelSpec, Recipe, RunSpec
from barnraise.state_dir import StateDir
from barnraise.training.limits.machine_facts import FactsReader
from barnraise.training.limits.rule_watch import RuleWatch
from barnraise.training.local_control import LocalControl
from barnraise.training.memory_watch import MemoryWatch
from barnraise.training.train import Worker

MODEL = ModelSpec(layers=4, width=128, heads=4, context=128, vocabulary=256)  # 842 K parameters
STEP_SEQUENCES = 8
STEP_TOKENS = STEP_SEQUENCES * MODEL.context


def build_setup(home: StateDir, steps: int, round_steps: int, peers: list[str]) -> Setup:
    """Return what the machine trains in: `steps` steps in all, `round_steps` in a round."""
    shared = home.path.parent / "text"
    manifest_file = shared.with_name("manifest.json")
    if not manifest_file.exists():
        manifest_file.write_text(prepare_text(shared, MIRROR).model_dump_json())
    manifest = manifest_file.read_text()
    recipe = Recipe(
        token_budget=steps * STEP_TOKENS,
        learning_rate=3e-3,
        warmup_tokens=5 * STEP_TOKENS,
        step_sequences=STEP_SEQUENCES,
        round_steps=round_steps,
        evaluate_every=1 << 40,
    )
    spec = RunSpec(
        MODEL,
        TEXT,
        recipe,
        seed=7,
        owner=MIRROR.key,
        roots=(MIRROR.key,),
        manifest=digest(json.loads(manifest)["body"]),
    )
    own_port, peers_port, peers_key = (*peers, 0, 0, "")[:3]
    first_peers = ((str(peers_key), int(peers_port)),) if peers else ()
    return Setup(home.path, spec.to_json(), manifest, int(own_port), first_peers)


def main() -> None:
    """Train until the run ends or the process is told to stop."""
    lower_priority()  # before any thread computes
    home = StateDir(Path(sys.argv[1]))
    logging.basicConfig(
        filename=home.path / "log", level=logging.INFO, format="%(asctime)s %(message)s"
    )
    leaving = stop_on_signals()
    torch.set_num_threads(home.limits.threads or torch.get_num_threads())
    setup = build_setup(home, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    joined = build_joined_run(setup, home)
    blobs = joined.folder.path / "blobs"
    shutil.copytree(home.path.parent / "text", blobs, dirs_exist_ok=True)
    LocalControl(joined.folder.path).register_worker()
    rules = RuleWatch(home, FactsReader())
    transport = IrohTransport(home.identity.secret, host="127.0.0.1", port=setup.port)
    with rules.running():
        worker = Worker(joined, leaving, ONE_CORE_MACHINE, home.limits, transport=transport)
        worker.watch_memory(MemoryWatch())
        worker.watch_rules(rules)
        worker.run()


if __name__ == "__main__":
    main()
