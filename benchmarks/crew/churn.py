"""Kill machines of a crew at any instant, start them again, and see what that costs."""

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import churn_process
import torch
from joined_run import RUN
from udp_ports import free_udp_port

from barnraise.state_dir import StateDir
from barnraise.training.checkpoint import CheckpointSlots, StateHeader
from barnraise.training.crew.crew_membership import STATE_FOLDER
from barnraise.training.local_status import LocalStatus, read_status

ROLES = {"lead": "lead", "ada": "member", "ben": "member", "witness": "witness"}
CONNECTED = "the crew is connected: 3 machines"
ROUND_STEPS = 10
RESTART_SECONDS = (0.5, 3.0)  # from a kill to the start of the next process
START_SECONDS, RETURN_SECONDS = 240.0, 240.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ChurnResult:
    """What kills have cost.

    Attributes:
        lost_updates: that the lead had published, and that the witness lacks in the end.
        return_seconds: from each kill to the first step of the whole crew after it.
        lost_rounds: the most rounds that a kill has cost.
        anchors_equal: whether all machines together have the witness's anchor in the end.
    """

    lost_updates: int
    return_seconds: list[float]
    lost_rounds: float
    anchors_equal: bool

    @property
    def median_return(self) -> float:
        """Return the median of `return_seconds`."""
        return median(self.return_seconds)


@dataclass
class ChurnDrill:
    """The processes of one drill."""

    folder: Path
    cleanup: ExitStack
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    published: int = 0  # updates of the lead's author that it has stated

    def __post_init__(self) -> None:
        self.ports = {name: free_udp_port() for name in ROLES}
        lead = StateDir(self.folder / "lead")
        self.lead_key = lead.identity.key
        churn_process.prepare(self.folder, self.lead_key, self.ports["lead"])

    def start(self, name: str) -> None:
        """Start a machine's process."""
        StateDir(self.folder / name)
        arguments = [str(self.folder / name), ROLES[name], str(self.ports[name])]
        process = subprocess.Popen([sys.executable, churn_process.__file__, *arguments])
        self.processes[name] = process
        self.cleanup.callback(process.wait)
        self.cleanup.callback(process.kill)

    def kill(self, name: str) -> None:
        """Kill a machine's process as a power failure does."""
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self, name: str) -> None:
        """End a machine's process as Ctrl-C does."""
        self.processes[name].terminate()
        self.processes[name].wait(60)

    def read_log(self, name: str) -> str:
        """Return what a machine has logged."""
        path = self.folder / name / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def read_status(self) -> LocalStatus | None:
        """Return the lead's last status."""
        status = read_status(self._run_folder("lead"))
        if status is not None:
            self.published = max(self.published, status.updates_sent)
        return status

    def _run_folder(self, name: str) -> Path:
        return self.folder / name / "runs" / RUN

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until something holds."""
        ends_at = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > ends_at:
                logs = "\n".join(f"{name}: {self.read_log(name)[-1500:]}" for name in ROLES)
                raise TimeoutError(f"{what}: not within {seconds:.0f} s\n{logs}")
            time.sleep(POLL_SECONDS)

    def wait_for_steps(self, connections: int, seconds: float) -> int:
        """Wait until the crew was connected so often and has made a step.

        Returns:
            The position of the state with which it has begun.
        """

        def is_connected() -> bool:
            return self.read_log("lead").count(CONNECTED) >= connections

        self.wait(is_connected, seconds, f"connection {connections} of the crew")
        connected_at = time.time()
        saved = CheckpointSlots(self._run_folder("lead") / "checkpoint").header
        position = saved.step if saved else 0

        def has_step() -> bool:
            status = self.read_status()
            return status is not None and status.at >= connected_at and status.step > position

        self.wait(has_step, seconds, "a step of the crew")
        return position

    def kill_and_restart(self, name: str, rng: random.Random) -> tuple[float, float]:
        """Kill a machine; return the seconds until the crew trains, and the rounds it has lost."""
        connections = self.read_log("lead").count(CONNECTED)
        started = time.monotonic()
        self.kill(name)
        before = int((self._run_folder("lead") / churn_process.POSITION_FILE).read_text())
        time.sleep(rng.uniform(*RESTART_SECONDS))
        self.start(name)
        after = self.wait_for_steps(connections + 1, RETURN_SECONDS)
        return time.monotonic() - started, max(0, before - after) / ROUND_STEPS

    def compare_anchors(self) -> tuple[int, bool]:
        """Return how many updates the witness lacks, and whether the machines have its anchor."""
        tensors, lead = self._load("lead", "checkpoint")
        other, witness = self._load("witness", "checkpoint")
        label = int(tensors["crew"])
        parts = [tensors]
        for name in ("ada", "ben"):
            folder = self._run_folder(name) / STATE_FOLDER / self.lead_key / "checkpoint"
            saved = CheckpointSlots(folder).load(label)
            if saved is not None:
                parts.append(dict(saved[0]))
        anchor = {i: part[i] for part in parts for i in part if i.startswith("anchor.")}
        expected = [i for i in other if i.startswith("anchor.")]
        is_equal = set(anchor) == set(expected)
        is_equal = is_equal and all(torch.equal(anchor[i], other[i]) for i in expected)
        sent = max(self.published, count_updates(lead))
        return sent - count_updates(witness), is_equal

    def has_saved(self, name: str) -> bool:
        """Return whether a machine has a saved state."""
        return CheckpointSlots(self._run_folder(name) / "checkpoint").header is not None

    def _load(self, name: str, folder: str) -> tuple[dict[str, torch.Tensor], StateHeader]:
        saved = CheckpointSlots(self._run_folder(name) / folder).load()
        assert saved is not None, f"{name} has saved nothing"
        return dict(saved[0]), saved[1]


def count_updates(header: StateHeader) -> int:
    """Return the updates in a saved anchor; the lead's author has made all."""
    return sum(head.seq for head in header.heads.values())


def run_churn(kills: int, seconds: float, seed: int = 1) -> ChurnResult:
    """Kill machines of a crew of three so often in so many seconds; one of them is the lead."""
    rng = random.Random(seed)
    victims = ["lead", *(rng.choice(["ada", "ben"]) for _ in range(kills - 1))]
    rng.shuffle(victims)
    instants = sorted(rng.uniform(0, seconds) for _ in victims)
    costs: list[tuple[float, float]] = []
    with ExitStack() as cleanup:
        folder = Path(tempfile.mkdtemp(prefix="barnraise-"))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        drill = ChurnDrill(folder, cleanup)
        drill.start("lead")
        code = folder / churn_process.CODE_FILE
        drill.wait(lambda: code.exists() and code.read_text() != "", START_SECONDS, "the code")
        for name in ("ada", "ben", "witness"):
            drill.start(name)
        drill.wait_for_steps(1, START_SECONDS)
        drill.wait(lambda: drill.has_saved("witness"), START_SECONDS, "the witness's first state")
        started = time.monotonic()
        for victim, instant in zip(victims, instants, strict=True):
            time.sleep(max(0.0, started + instant - time.monotonic()))
            costs.append(drill.kill_and_restart(victim, rng))
            print(f"  {victim}: {costs[-1][0]:.1f} s, {costs[-1][1]:.1f} rounds", flush=True)
        drill.stop("lead")
        drill.stop("witness")
        lost, is_equal = drill.compare_anchors()
    return ChurnResult(lost, [cost[0] for cost in costs], max(cost[1] for cost in costs), is_equal)
