"""Start and end the attacks of a drill, each in a process of its own."""

import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import stranger_attacks
from child_processes import ChildProcesses, ChildStatus
from drill_machine import FORK, DrillMachine, read_json
from stranger import AttackSetup

END_SECONDS = 30.0  # for an attack to end by itself


class AttackProcess:
    """One attack, from its start to its end.

    Attributes:
        started_at: When it started, in seconds since 1970.
    """

    def __init__(self, setup: AttackSetup, children: ChildProcesses) -> None:
        """Start the attack."""
        self.setup = setup
        self._should_run = True
        children.watch(self._child_statuses)
        self.started_at = time.time()
        self._process: BaseProcess = FORK.Process(
            target=stranger_attacks.run_attack, args=(setup,), daemon=True
        )
        self._process.start()

    @property
    def keys(self) -> list[str]:
        """The keys under which the attack may publish."""
        return stranger_attacks.attack_keys(self.setup.volunteer, self.setup.attack)

    @property
    def record(self) -> dict[str, Any]:
        """What the attack has counted so far: its acts and how they were refused."""
        return {"counts": {}, "refusals": {}} | read_json(self.setup.record)

    def _child_statuses(self) -> list[ChildStatus]:
        if not self._should_run:
            return []
        log = self.setup.record.with_suffix(".log")
        return [ChildStatus(f"'{self.setup.attack}'", self._process.exitcode, log)]

    def end(self) -> None:
        """End the attack; kill it if it does not end."""
        self._should_run = False
        if self._process.is_alive() and self._process.pid is not None:
            self._process.terminate()
            self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_SECONDS)


def attack_setup(
    attack: str,
    volunteer: str,
    spec: str,
    victims: list[DrillMachine],
    record_folder: Path,
    rate: int,
    *extra: str,
) -> AttackSetup:
    """Return what an attack on some machines is started with."""
    record_folder.mkdir(parents=True, exist_ok=True)
    return AttackSetup(
        attack=attack,
        volunteer=volunteer,
        spec=spec,
        victims=tuple((machine.key, machine.port) for machine in victims),
        max_tokens_per_second=rate,
        record=record_folder / f"{attack.replace(' ', '-')}.json",
        extra=extra,
    )
