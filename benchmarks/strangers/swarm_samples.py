"""Sample the machines of a drill while it runs: memory, links, and the bits of their anchors."""

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psutil
from drill_machine import DrillMachine

INTERVAL = 0.5  # seconds between two samples


@dataclass(frozen=True)
class MemorySample:
    """What a machine's process holds: when, in seconds since 1970, and how many bytes."""

    at: float
    rss: int


class SwarmSamples:
    """Samples of some machines, taken by a thread of its own.

    Attributes:
        isolated: Names of machines that were linked to an honest machine once, and at some sample
            to none.
        divergent: Names of machines whose anchors differed from another's with the same updates.
    """

    def __init__(self, machines: Sequence[DrillMachine]) -> None:
        """Sample these machines, which are all honest, from `start` on."""
        self._machines = machines
        self._keys = {machine.key for machine in machines}
        self._memory: dict[str, list[MemorySample]] = defaultdict(list)
        self._linked: set[str] = set()
        self._anchors: dict[str, tuple[str, str]] = {}  # vector digest → anchor digest, machine
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.isolated: set[str] = set()
        self.divergent: set[str] = set()

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL):
            for machine in list(self._machines):
                self._sample(machine)

    def _sample(self, machine: DrillMachine) -> None:
        process = machine.process
        if process is None or process.pid is None or not process.is_alive():
            return
        try:
            rss = psutil.Process(process.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return
        self._memory[machine.name].append(MemorySample(time.time(), rss))
        status = machine.status
        if not status:
            return
        self._check_links(machine.name, {peer["key"] for peer in status.get("neighbours", ())})
        vector, anchor = status.get("vector"), status.get("anchor")
        if vector and anchor:
            first, other = self._anchors.setdefault(vector, (anchor, machine.name))
            if first != anchor:
                self.divergent |= {machine.name, other}

    def _check_links(self, name: str, neighbours: Collection[str]) -> None:
        if self._keys & set(neighbours):
            self._linked.add(name)
        elif name in self._linked:
            self.isolated.add(name)

    def restart_links(self) -> None:
        """Forget who was linked: machines that begin again are not isolated before they link."""
        self._linked.clear()

    def growth_mb(self, since: float, until: float) -> float:
        """Return by how many MB the memory of any machine grew at most between two times."""
        growths = [0.0]
        for samples in self._memory.values():
            inside = [sample.rss for sample in samples if since <= sample.at < until]
            before = [sample.rss for sample in samples if sample.at < since]
            if inside and before:
                growths.append((max(inside) - before[-1]) / 1e6)
        return max(growths)
