"""Train one model on two workers, with a site of their own, all on this machine.

    python examples/two_workers.py [TOKENS] [FOLDER]

The site has an embedded Postgres and Valkey in the folder, and its page of the run shows how the
training goes. The workers send their updates to each other directly, and end with the same weights.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import django

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "worker")]
os.environ["DJANGO_SETTINGS_MODULE"] = "coordinator.settings"


def main(tokens: int, folder: Path) -> None:
    """Start the site, enrol two people's machines, and let them train."""
    from coordinator.demo.demo_people import OWNER, VOLUNTEERS, DemoPeople
    from coordinator.demo.stack import DemoStack

    with DemoStack(folder / "demo") as stack:
        stack.start_measurement()
        stack.start_site()
        stack.wait_for_site()
        people = DemoPeople(folder)
        owners = {1: people.create(OWNER), 2: people.create(VOLUNTEERS[0])}
        run = stack.launch_run(
            owners[1],
            "Two workers",
            text__tokenizer="bytes",
            recipe__token_budget=tokens,
            recipe__learning_rate=3e-3,
        )
        stack.enrol(owners)
        stack.wait_for_measurement()
        stack.start_workers([1, 2], run)
        print(f"watch it at {stack.url}{run.get_absolute_url()}", flush=True)
        workers = [stack.processes.children[f"worker-{number}"] for number in owners]
        while any(worker.poll() is None for worker in workers):
            stack.check_processes()
            statuses = [stack.read_status(number, run) or {} for number in owners]
            print(*(describe(status) for status in statuses), sep=" · ", flush=True)
            time.sleep(2)
        first, second = (stack.read_status(number, run) for number in owners)
        print("same weights" if first["anchor"] == second["anchor"] else "other weights")


def describe(status: dict) -> str:
    """Return a worker's status in a few words; it is empty at the start."""
    loss = status.get("loss")
    return f"step {status.get('step', 0)}, loss {'–' if loss is None else f'{loss:.3f}'}"


if __name__ == "__main__":
    arguments = sys.argv[1:]
    state = Path(arguments[1]) if len(arguments) > 1 else Path(tempfile.mkdtemp())
    state.chmod(0o755)  # an embedded Postgres runs as a user of its own where root starts it
    os.environ["BARNRAISE_STATE"] = str(state)
    django.setup()
    main(int(arguments[0]) if arguments else 300_000, state)
