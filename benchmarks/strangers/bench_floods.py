"""Measure what floods do to a machine: `make bench-floods`, docs/benchmarks/floods.md.

Two machines exchange updates over iroh, each a process of its own with a real ledger. For each
flood: first the delay of honest updates is measured in quiet, then while another process floods the
receiving machine, or requests everything from the publishing one. The script prints a line for each
flood, and one JSON object as its last line. `--quick`: about two minutes. Run nothing else on the
machine meanwhile.
"""

import argparse
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from child_processes import ChildProcesses, ChildStatus
from flood_peer import FLOODS
from udp_ports import free_udp_port

MAX_DELAY_RATIO = 2.0  # of an honest update's delay under a flood to that in quiet
MAX_GROWTH_MB = 50.0  # of the flooded machine's memory
WARM_UP_SECONDS = 2.0  # of the exchange between the two machines, which are not measured
FLOOD_LEAD_SECONDS = 2.0  # from the start of a flood to the first measured update


@dataclass(frozen=True)
class FloodResult:
    """What one flood did.

    Attributes:
        quiet_ms: Median delay of an honest update without the flood.
        flood_ms: Median delay under the flood.
        worst_ms: Longest delay under the flood.
        missing: Honest updates that did not arrive.
        growth_mb: By how much the flooded machine's memory grew at most.
        cpu_share: Of one core that the flooded machine used.
        accepted: Updates of the flood that entered the ledger.
        disk_mb: What the flooded machine's folder grew by, without the honest updates' payloads.
    """

    quiet_ms: float
    flood_ms: float
    worst_ms: float
    missing: int
    growth_mb: float
    cpu_share: float
    accepted: int
    disk_mb: float

    @property
    def ratio(self) -> float:
        """Return how much longer an honest update takes under the flood."""
        return self.flood_ms / self.quiet_ms

    @property
    def is_within_bounds(self) -> bool:
        """Return whether honest updates and memory stay within the bounds."""
        return (
            self.ratio <= MAX_DELAY_RATIO and self.growth_mb < MAX_GROWTH_MB and self.missing == 0
        )


class PeerProcess:
    """A process of `flood_peer.py` and the lines that it prints."""

    def __init__(
        self, bench: ChildProcesses, role: str, folder: Path, ports: tuple[int, int]
    ) -> None:
        """Start it."""
        self.bench = bench
        self.role = role
        self.folder = folder
        script = Path(__file__).with_name("flood_peer.py")
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "errors"
        self.errors = self.log.open("w")
        self._should_run = True
        self.process = subprocess.Popen(
            [sys.executable, str(script), role, str(folder), *map(str, ports)],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.usage = psutil.Process(self.process.pid)
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        bench.watch(self._child_statuses)

    def _child_statuses(self) -> list[ChildStatus]:
        if not self._should_run:
            return []
        return [ChildStatus(self.role, self.process.poll(), self.log)]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def wait_until_ready(self) -> None:
        """Wait for its first line."""
        self.bench.wait_until(lambda: not self._lines.empty(), f"the {self.role}'s start", 60)
        self._lines.get()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines since the last call."""
        lines: list[dict[str, Any]] = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        return lines

    def stop(self) -> None:
        """Kill it."""
        self._should_run = False
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.errors.close()


class FloodTrial:
    """Two machines, one of them flooded."""

    def __init__(
        self,
        bench: ChildProcesses,
        folder: Path,
        flood: str,
        quiet_seconds: float,
        flood_seconds: float,
    ) -> None:
        """Start the machines in `folder`."""
        self.flood = flood
        self.bench = bench
        self.folder = folder
        self.quiet_seconds = quiet_seconds
        self.flood_seconds = flood_seconds
        self.ports = free_udp_port(), free_udp_port()
        self.victim = PeerProcess(bench, "victim", folder / "victim", self.ports)
        self.victim.wait_until_ready()
        role = "limited" if flood == "requests" else "honest"
        self.honest = PeerProcess(bench, role, folder / "honest", self.ports)
        self.honest.wait_until_ready()
        self.flooded = self.honest if flood == "requests" else self.victim
        time.sleep(WARM_UP_SECONDS)

    def run(self) -> FloodResult:
        """Measure in quiet, then under a flood."""
        quiet, _, _ = self._measure(self.quiet_seconds)
        memory_before = self.flooded.usage.memory_info().rss
        disk_before = folder_bytes(self.flooded.folder)
        attack = PeerProcess(self.bench, self.flood, self.folder / "attack", self.ports)
        attack.wait_until_ready()
        time.sleep(FLOOD_LEAD_SECONDS)
        cpu_before = sum(self.flooded.usage.cpu_times()[:2])
        started_at = time.monotonic()
        delays, missing, accepted = self._measure(self.flood_seconds)
        cpu = sum(self.flooded.usage.cpu_times()[:2]) - cpu_before
        seconds = time.monotonic() - started_at
        attack.stop()
        honest_bytes = folder_bytes(self.folder / "honest") / max(1, self._published)
        grown = folder_bytes(self.flooded.folder) - disk_before
        return FloodResult(
            quiet_ms=1000 * median(quiet),
            flood_ms=1000 * median(delays) if delays else float("inf"),
            worst_ms=1000 * max(delays, default=float("inf")),
            missing=missing,
            growth_mb=(self._largest - memory_before) / 1e6,
            cpu_share=cpu / seconds,
            accepted=accepted,
            disk_mb=(grown - honest_bytes * (len(delays) + 4)) / 1e6,
        )

    def _measure(self, seconds: float) -> tuple[list[float], int, int]:
        """Return the delays of honest updates, how many did not arrive, and accepted others."""
        self.honest.lines()
        self.victim.lines()
        end = time.monotonic() + seconds
        self._largest = 0
        while time.monotonic() < end:
            self._largest = max(self._largest, self.flooded.usage.memory_info().rss)
            time.sleep(0.1)
        published = {line["seq"]: line["at"] for line in self.honest.lines()}
        time.sleep(2.0)  # for the last ones to arrive
        arrivals = self.victim.lines()
        arrived = {line["seq"]: line["at"] for line in arrivals if line["honest"]}
        self._published = max(published, default=0)
        delays = [arrived[seq] - at for seq, at in published.items() if seq in arrived]
        accepted = sum(not line["honest"] for line in arrivals)
        return delays, len(published) - len(delays), accepted

    def stop(self) -> None:
        """End both machines."""
        self.honest.stop()
        self.victim.stop()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all floods, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter floods")
    parser.add_argument("--only", choices=[*FLOODS], action="append", help="only this flood")
    options = parser.parse_args(arguments)
    quiet_seconds, flood_seconds = (4.0, 5.0) if options.quick else (15.0, 45.0)
    results: dict[str, FloodResult] = {}
    with ExitStack() as cleanup:
        folder = Path(
            cleanup.enter_context(tempfile.TemporaryDirectory(prefix="barnraise-floods-"))
        )
        bench = ChildProcesses(folder, cleanup)
        for flood in options.only or FLOODS:
            trial = FloodTrial(
                bench, folder / flood.replace(" ", "-"), flood, quiet_seconds, flood_seconds
            )
            results[flood] = result = trial.run()
            trial.stop()
            print(
                f"{flood:17} {result.quiet_ms:6.0f} ms → {result.flood_ms:6.0f} ms "
                f"(×{result.ratio:.2f}, worst {result.worst_ms:.0f} ms, {result.missing} missing), "
                f"memory {result.growth_mb:+.1f} MB, disk {result.disk_mb:+.1f} MB, "
                f"{100 * result.cpu_share:.0f} % of a core, {result.accepted} updates accepted",
                flush=True,
            )
    summary = {
        "floods": len(results),
        "honest_update_delay_ratio": round(max(r.ratio for r in results.values()), 2),
        "rss_growth_mb": round(max(r.growth_mb for r in results.values()), 1),
        "missing": sum(r.missing for r in results.values()),
        "within_bounds": all(r.is_within_bounds for r in results.values()),
    }
    print(json.dumps(summary))
    sys.exit(0 if summary["within_bounds"] else 1)


if __name__ == "__main__":
    main()
