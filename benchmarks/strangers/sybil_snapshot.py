"""Let idle accounts serve false weights to a machine that trains, and to one that joins."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from attack_process import AttackProcess, attack_setup
from child_processes import Progress
from drill_machine import DrillMachine, DrillWorld

ATTACK = "sybil snapshot"
MIN_SECONDS = 30.0  # of the attack: only then do machines request a snapshot, and again
EVENT_SECONDS = 120.0  # for what must happen, on a machine without other work


@dataclass(frozen=True)
class SybilScale:
    """How long the attack lasts.

    Attributes:
        updates: Of the member during the attack.
        rate: Tokens per second of the tickets.
    """

    updates: int
    rate: int


def count_moved_machines(world: DrillWorld, record_folder: Path, scale: SybilScale) -> int:
    """Return how many of two machines take anything that idle accounts serve.

    One machine, the only honest one, trains; the other joins among the accounts. No site confirms
    any weights, so that the joiner must wait.

    Args:
        world: Of the two machines, without any yet.
        record_folder: Where the attack writes what it counts.
        scale: How long it lasts.
    """
    member, joiner = machines = [DrillMachine(world, name) for name in ("member", "joiner")]
    world.machines.append(member)
    member.start()
    world.children.wait_until(lambda: member.updates_sent > 2, "an update", EVENT_SECONDS)
    setup = attack_setup(ATTACK, "sybil", world.spec.to_json(), machines, record_folder, scale.rate)
    attack = AttackProcess(setup, world.children)
    world.children.wait_until(
        lambda: attack.record["counts"].get("headers of phantoms"), "the phantom", EVENT_SECONDS
    )
    joiner.start(trust_one=False)
    first = member.updates_sent

    def has_lasted() -> bool:
        is_long = time.time() > attack.started_at + MIN_SECONDS
        has_trained = member.updates_sent >= first + scale.updates
        return is_long and has_trained and bool(joiner.status.get("waiting"))

    progress = Progress(lambda: member.status.get("step", 0), float("inf"))
    world.children.wait_until(has_lasted, "the attack's end", EVENT_SECONDS, progress)
    print(f"    {ATTACK}: {attack.record['counts']}", flush=True)
    attack.end()
    for machine in machines:
        machine.send_signal(signal.SIGINT)
        machine.wait_for_exit()
    return sum(has_false_authors(machine, {member.key, joiner.key}) for machine in machines)


def has_false_authors(machine: DrillMachine, keys: set[str]) -> bool:
    """Return whether a machine's ledger has an author, or a base, that is not of these keys."""
    with machine.open_ledger() as ledger:
        authors = {author.partition(".")[0] for author in ledger.vector()}
        return bool(authors - keys) or bool(ledger.base.heads())
