"""The machines of a drill: real workers, each another person's; and whether they ever stop training."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mirror_site import Site, until

from coordinator.demo.processes import ProcessGroup

HERE = Path(__file__).parent
WINDOW = 10.0  # seconds in which each must have trained
LOOK = 0.5  # seconds between two looks at what they say of themselves


class Workers:
    """`pauses`: (machine, begin) of every window in which a machine took no step, from `watch` to `close`."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.numbers = folder, range(1, count + 1)
        self.family = ProcessGroup(folder / "logs")
        self.run = ""
        self.steps: dict[int, list[tuple[float, int]]] = {n: [] for n in self.numbers}
        self._watching = threading.Event()

    @property
    def names(self) -> list[str]:
        return [f"volunteer-{n}" for n in self.numbers]

    def home(self, number: int) -> Path:
        return self.folder / f"worker-{number}"

    def key(self, number: int) -> str:
        from barnraise.state_dir import StateDir

        return StateDir(self.home(number)).identity.key

    @property
    def _alike(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", "BARNRAISE_HARDWARE": str(self.folder / "hardware.json")}

    def measure(self, known: Path) -> None:
        """They share one machine, and one measurement of it; one that was kept from before will do."""
        if known.exists():
            (self.folder / "hardware.json").write_text(known.read_text())
            return
        command = (
            "-m",
            "barnraise",
            "plan",
            "--model",
            "gpt-nano",
            "--threads",
            "1",
            "--home",
            str(self.folder),
        )
        measured = self.family.start("measure", sys.executable, *command, **self._alike)
        assert measured.wait(400) == 0, self.family.log_tail("measure")
        del self.family.children["measure"]

    def enrol(self, site: Site, people: dict[str, str]) -> None:
        """Run `barnraise login` on each machine; its owner approves."""
        for n, name in zip(self.numbers, self.names, strict=True):
            command = (
                "-m",
                "barnraise",
                "login",
                site.url,
                "--name",
                name,
                "--home",
                str(self.home(n)),
            )
            self.family.start(f"login-{n}", sys.executable, *command)

        def enrolled() -> bool:
            site.require("approve", owners=people)
            return all(self.family.children[f"login-{n}"].poll() == 0 for n in self.numbers)

        until(enrolled, "six machines' enrolment", 180)
        for n in self.numbers:
            del self.family.children[f"login-{n}"]

    def start(self, number: int, slug: str) -> None:
        command = (
            HERE / "volunteer.py",
            "join",
            slug,
            "--home",
            self.home(number),
            "--threads",
            "1",
        )
        self.family.start(f"worker-{number}", sys.executable, *map(str, command), **self._alike)

    def status(self, number: int) -> dict[str, Any] | None:
        try:
            return json.loads((self.home(number) / "runs" / self.run / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return None

    # ---- whether they train

    def watch(self) -> None:
        self._watching.set()
        threading.Thread(target=self._look, name="training", daemon=True).start()

    def _look(self) -> None:
        while self._watching.is_set():
            for n in self.numbers:
                if (said := self.status(n)) is not None:
                    self.steps[n].append((time.monotonic(), said["step"]))
            time.sleep(LOOK)

    def close(self) -> None:
        self._watching.clear()

    @property
    def pauses(self) -> list[tuple[int, float]]:
        found = []
        for n, seen in self.steps.items():
            begin, step = seen[0] if seen else (0.0, 0)
            for at, now in seen:
                if at - begin >= WINDOW:
                    if now <= step:
                        found.append((n, begin))
                    begin, step = at, now
        return found

    @property
    def alive(self) -> int:
        return sum(self.family.children[f"worker-{n}"].poll() is None for n in self.numbers)

    def ledgers(self) -> list[tuple[int, str]]:
        """(tokens in its ledger, its version vector) of each."""
        said = [self.status(n) or {} for n in self.numbers]
        return [(each.get("ledger_tokens", 0), each.get("vector", "")) for each in said]

    def stop(self) -> None:
        self.family.stop()
