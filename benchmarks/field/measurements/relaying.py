"""Measure what a fast line saves sixteen slow ones: `make bench-exchange ONLY=relay`.

Sixteen machines publish updates in namespaces whose lines are home lines and one of 1 Gb/s, all
twenty times slower, so that the lines limit and not this machine's processor. At first the fast
machine has a home line as well. Then its line becomes fast, and it carries for the others. At last
it is killed, and the others repair their trees.
"""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from child_processes import ChildProcesses, ChildStatus
from field_network import FieldNetwork
from relay_peer import PeerSetup

from barnraise.planning.lines import HOME_LINE, LINES, Line

MACHINES = 16
SLOWER = 20  # than real lines
PORT = 4550
UPLINK_SHARE = 0.9  # of the line that volunteers give
STEP_SECONDS = 0.05
# The machine with the fast line trains slowly: what its line carries is to be seen, not its rounds.
SLOW_STEP_SECONDS = 16 * STEP_SECONDS
PEER = Path(__file__).resolve().parents[1] / "relay_peer.py"


def scale_down(line: Line) -> Line:
    """Return a line as the benchmark has it."""
    return Line(line.name, line.up_megabits / SLOWER, line.down_megabits / SLOWER)


HOME, FAST = scale_down(HOME_LINE), scale_down(LINES[-1])


@dataclass(frozen=True)
class Phases:
    """How long each phase lasts, in seconds.

    Attributes:
        start: until all machines are linked.
        slow: in which all lines are slow; its first two fifths are not counted, in which the line
            sends what the first, short rounds published.
        adapt: until most have a carrier, at most.
        fast: in which the fast line carries.
        repair: after the kill, at most.
        agree: until all have the same weights, at most.
    """

    start: float = 60.0
    slow: float = 320.0
    adapt: float = 300.0
    fast: float = 96.0
    repair: float = 200.0
    agree: float = 200.0


@dataclass
class Log:
    """What the machines recorded.

    Attributes:
        published: rank → when each of its updates was published, in order.
        arrived: (author's rank, sequence number) → rank → when it arrived there.
    """

    published: dict[int, list[float]] = field(default_factory=dict)
    arrived: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Log":
        """Read the events of all machines."""
        log = cls()
        ranks: dict[str, int] = {}
        events: list[tuple[int, dict[str, Any]]] = []
        for rank in range(MACHINES):
            lines = (folder / str(rank) / "events").read_text().splitlines()
            events += [(rank, json.loads(line)) for line in lines if line.endswith("}")]
        for rank, event in events:
            if event["event"] == "published":
                ranks[event["author"]] = rank
                log.published.setdefault(rank, []).append(event["at"])
        for rank, event in events:
            if event["event"] == "arrived":
                name = ranks[event["author"]], event["seq"]
                log.arrived.setdefault(name, {})[rank] = event["at"]
        return log

    def rounds_each(self, start: float, end: float) -> float:
        """Return how many rounds a slow machine published per second, on average."""
        counts = [
            sum(start <= at < end for at in self.published.get(rank, []))
            for rank in range(1, MACHINES)
        ]
        return fmean(counts) / (end - start)

    def rounds_until_repaired(self, killed_at: float) -> int | None:
        """Return the rounds after which an update of each survivor has reached all others.

        It is the largest number of updates that a survivor published since the kill, until the
        first one that all others have had arrived. None if some survivor's never did.
        """
        most = 0
        for rank in range(1, MACHINES):
            times = self.published[rank]
            later = [seq for seq, at in enumerate(times, 1) if at >= killed_at]
            reached = [
                max(self.arrived[rank, seq].values())
                for seq in later
                if len(self.arrived.get((rank, seq), {}).keys() - {0}) == MACHINES - 2
            ]
            if not reached:
                return None
            most = max(most, sum(killed_at <= at < min(reached) for at in times))
        return most


class RelayBench:
    """The machines, and what was measured of them."""

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        """Build the network; its end, and that of all processes, is `cleanup`'s."""
        self._folder = folder
        self._network = FieldNetwork(MACHINES, None, cleanup)
        self._children = ChildProcesses(folder, cleanup)
        self._network.create()
        self._network.shape(HOME)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._killed = False

    def start(self) -> None:
        """Start all machines, each on a home line."""
        hosts = [self._network.host(rank) for rank in range(MACHINES)]
        for rank in range(MACHINES):
            folder = self._folder / str(rank)
            folder.mkdir(parents=True)
            uplink = UPLINK_SHARE * HOME.up_bytes
            seconds = STEP_SECONDS if rank else SLOW_STEP_SECONDS
            setup = PeerSetup(str(folder), rank, hosts, PORT, uplink, seconds)
            (folder / "setup.json").write_text(json.dumps(asdict(setup)))
            command = [sys.executable, str(PEER), str(folder / "setup.json")]
            with (folder / "log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*self._network.command_prefix(rank), *command], stdout=log, stderr=log
                    )
                )
        self._children.watch(self._statuses)

    def _statuses(self) -> list[ChildStatus]:
        return [
            ChildStatus(f"machine {rank}", process.poll(), self._folder / str(rank) / "log")
            for rank, process in enumerate(self._processes)
            if rank or not self._killed
        ]

    def statuses(self, first: int = 1) -> list[dict[str, Any]]:
        """Return what the machines from `first` on wrote last; those that wrote nothing lack."""
        paths = [self._folder / str(rank) / "status" for rank in range(first, MACHINES)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def wait(self, seconds: float) -> tuple[float, float]:
        """Let the machines run; return the begin and the end in seconds since 1970."""
        start = time.time()
        self._children.wait_until(lambda: time.time() >= start + seconds, "time", 2 * seconds)
        return start, time.time()

    def wait_for(self, condition: Any, seconds: float) -> float:
        """Wait until a condition holds, at most so many seconds; return how long it took."""
        start = time.time()

        def is_over() -> bool:
            return condition() or time.time() >= start + seconds

        self._children.wait_until(is_over, "the machines", 2 * seconds)
        return time.time() - start

    def run(self, phases: Phases) -> dict[str, Any]:
        """Measure everything."""
        self.start()
        self.wait_for(lambda: _count(self.statuses(0), "links", 8) == MACHINES, phases.start)
        self.wait(phases.slow * 2 / 5)
        slow = self.wait(phases.slow * 3 / 5)
        before = self.statuses()
        _print("slow", before)
        self._network.shape_worker(0, FAST)
        (self._folder / "0" / "uplink").write_text(str(UPLINK_SHARE * FAST.up_bytes))
        usual = fmean(status["period"] for status in before)
        adapting = self.wait_for(lambda: self._has_adapted(usual), phases.adapt)
        _print(f"adapted after {adapting:.0f} s", self.statuses())
        sent = self._network.bytes_sent()
        fast = self.wait(phases.fast)
        sent = [now - then for now, then in zip(self._network.bytes_sent(), sent, strict=True)]
        after = self.statuses()
        _print("fast", after)
        shares = [part / (HOME.up_bytes * (fast[1] - fast[0])) for part in sent[1:]]
        print(f"shares of their lines: {[round(each, 2) for each in shares]}", flush=True)
        self._killed = True
        killed_at = time.time()
        _kill(self._processes[0])
        self.wait_for(
            lambda: Log.read(self._folder).rounds_until_repaired(killed_at), phases.repair
        )
        _print("repaired", self.statuses())
        for rank in range(1, MACHINES):
            (self._folder / str(rank) / "stop").touch()
        self.wait_for(self._agree, phases.agree)
        log = Log.read(self._folder)
        return {
            "own_copies": round(fmean(status["copies"] for status in after), 2),
            "uplink_share": round(max(shares), 3),
            "rounds_gain": round(log.rounds_each(*fast) / log.rounds_each(*slow), 2),
            "agree": self._agree(),
            "relay_killed_rounds": log.rounds_until_repaired(killed_at),
        }

    def _has_adapted(self, usual: float) -> bool:
        statuses = self.statuses()
        short = sum(status["period"] <= usual / 4 for status in statuses)
        return short >= MACHINES - 2

    def _agree(self) -> bool:
        statuses = self.statuses()
        states = {(json.dumps(s["vector"], sort_keys=True), s["anchor"]) for s in statuses}
        return len(states) == 1 and len(statuses) == MACHINES - 1


def _count(statuses: list[dict[str, Any]], name: str, least: float) -> int:
    return sum(status[name] >= least for status in statuses)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def _print(name: str, statuses: list[dict[str, Any]]) -> None:
    """Print what the slow machines measure."""
    columns = ("copies", "relayed", "machines", "has_carrier", "links", "period")
    means = {column: round(fmean(float(s[column]) for s in statuses), 2) for column in columns}
    schemes = sorted({status["scheme"] for status in statuses})
    print(f"{name}: {json.dumps(means)}, {', '.join(schemes)}", flush=True)


def measure_relaying(folder: Path, phases: Phases | None = None) -> dict[str, Any]:
    """Measure what one fast line saves fifteen slow ones.

    Raises:
        NamespaceError: There are no network namespaces for this process.
    """
    with ExitStack() as cleanup:
        return RelayBench(folder, cleanup).run(phases or Phases())
