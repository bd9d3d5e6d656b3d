"""Run the machines of a drill, real workers of different people, and detect training pauses."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from child_processes import ChildProcesses, list_statuses
from mirror_site import Site

from barnraise.state_dir import StateDir
from coordinator.demo.processes import ProcessGroup

HERE = Path(__file__).parent
# A machine that takes no step for so long has paused; see `AvailableClock`.
WINDOW_SECONDS = 10.0
POLL_SECONDS = 0.5  # between two readings of the status files


class WorkerGroup:
    """Start `count` workers and watch their steps.

    Attributes:
        run: Id of the run that they train.
        steps: Machine → (seconds, step) of each reading.
    """

    def __init__(self, folder: Path, count: int, drill: ChildProcesses) -> None:
        self.folder = folder
        self.drill = drill
        self.numbers = range(1, count + 1)
        self.processes = ProcessGroup(folder / "logs")
        self.run = ""
        self.steps: dict[int, list[tuple[float, int]]] = {n: [] for n in self.numbers}
        self._watching = threading.Event()
        tasks = ("measure", *(f"login-{n}" for n in self.numbers))
        drill.watch(
            lambda: list_statuses(self.processes.children, self.processes.logs, may_finish=tasks)
        )

    @property
    def names(self) -> list[str]:
        """Return the names of the machines and of their owners."""
        return [f"volunteer-{n}" for n in self.numbers]

    def state_path(self, number: int) -> Path:
        """Return the state folder of a machine."""
        return self.folder / f"worker-{number}"

    def key(self, number: int) -> str:
        """Return the public key of a machine."""
        return StateDir(self.state_path(number)).identity.key

    @property
    def _process_environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", "BARNRAISE_HARDWARE": str(self.folder / "hardware.json")}

    def measure_hardware(self, stored: Path) -> None:
        """Measure this computer once for all machines, or use the measurement in `stored`."""
        if stored.exists():
            (self.folder / "hardware.json").write_text(stored.read_text())
            return
        command = ("plan", "--model", "gpt-nano", "--threads", "1", "--home", str(self.folder))
        measuring = self.processes.start(
            "measure", sys.executable, "-m", "barnraise", *command, **self._process_environment
        )
        self.drill.wait_until(
            lambda: measuring.poll() == 0, "the measurement of this computer", 400
        )
        del self.processes.children["measure"]

    def enrol(self, site: Site, people: dict[str, str]) -> None:
        """Run `barnraise login` on each machine; its owner approves.

        Args:
            site: The mirror at which they enrol.
            people: Name of a machine → id of its owner.
        """
        for n, name in zip(self.numbers, self.names, strict=True):
            command = ("login", site.url, "--name", name, "--home", str(self.state_path(n)))
            self.processes.start(f"login-{n}", sys.executable, "-m", "barnraise", *command)

        def all_enrolled() -> bool:
            site.require("approve_machines", owners=people)
            return all(self.processes.children[f"login-{n}"].poll() == 0 for n in self.numbers)

        self.drill.wait_until(all_enrolled, "six machines' enrolment", 180)
        for n in self.numbers:
            del self.processes.children[f"login-{n}"]

    def start(self, number: int, slug: str) -> None:
        """Start one machine's `barnraise join`."""
        command = ("join", slug, "--home", str(self.state_path(number)), "--threads", "1")
        self.processes.start(
            f"worker-{number}",
            sys.executable,
            HERE / "volunteer.py",
            *command,
            **self._process_environment,
        )

    def status(self, number: int) -> dict[str, Any] | None:
        """Return the content of a machine's status file; None if there is none yet."""
        path = self.state_path(number) / "runs" / self.run / "status.json"
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None

    # ---- pauses in training

    def start_watching(self) -> None:
        """Record every machine's steps from now on."""
        self._watching.set()
        threading.Thread(target=self._record_steps, name="training", daemon=True).start()

    def _record_steps(self) -> None:
        while self._watching.is_set():
            for n in self.numbers:
                status = self.status(n)
                if status is not None:
                    self.steps[n].append((self.drill.clock.now(), status["step"]))
            time.sleep(POLL_SECONDS)

    def stop_watching(self) -> None:
        """Stop recording steps."""
        self._watching.clear()

    @property
    def pauses(self) -> list[tuple[int, float]]:
        """Return (machine, start) of every window in which a machine took no step."""
        found = []
        for n, readings in self.steps.items():
            start, first_step = readings[0] if readings else (0.0, 0)
            for at, step in readings:
                if at - start >= WINDOW_SECONDS:
                    if step <= first_step:
                        found.append((n, start))
                    start = at
                    first_step = step
        return found

    @property
    def alive(self) -> int:
        """Return the number of workers that run."""
        return sum(self.processes.children[f"worker-{n}"].poll() is None for n in self.numbers)

    def ledgers(self) -> list[tuple[int, str]]:
        """Return for each machine the tokens in its ledger and the digest of its version vector."""
        statuses = [self.status(n) or {} for n in self.numbers]
        return [(status.get("ledger_tokens", 0), status.get("vector", "")) for status in statuses]

    def stop(self) -> None:
        """Stop all workers."""
        self.processes.stop()
