"""Make random changes at a drill's mirrors: one after another, each at a random live mirror."""

import random
import threading
import time
from collections import Counter
from typing import Any

from mirror_site import Site

CHANGES = ("account", "account", "rename", "ban", "unban", "run", "settings", "settings")
ANSWER_SECONDS = 20.0  # within which a change must be accepted
# Errors of a mirror that has not received the person or the run yet.
NOT_REPLICATED_YET = ("matching query does not exist", "ValueError: 404")


class RandomChanges(threading.Thread):
    """Make a change every `interval` seconds, between `resume` and `wait_until_idle`.

    A change that a mirror refused, or that it did not answer, is counted but need not survive.

    Attributes:
        accepted: Digest of an event → (mirror, change).
        made: Number of accepted changes by mirror.
        refused: Number of refused changes by mirror.
        unexpected: Refusals by mirrors without a fault.
    """

    def __init__(self, sites: list[Site], interval: float, seed: int) -> None:
        super().__init__(name="changes", daemon=True)
        self.sites = sites
        self.interval = interval
        self.accepted: dict[str, tuple[str, str]] = {}
        self.made: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self._random = random.Random(seed)
        self._people: list[str] = []
        self._banned: list[str] = []
        self._runs: list[str] = []
        self._active = threading.Event()
        self._stopped = threading.Event()
        self._change_lock = threading.Lock()  # held while a change is made
        self._count = 0

    def run(self) -> None:
        """Make changes until `stop`."""
        while not self._stopped.is_set():
            self._active.wait(0.2)
            live = [site for site in self.sites if site.is_running]
            if self._active.is_set() and live:
                with self._change_lock:
                    if self._active.is_set():
                        self.make_change(self._random.choice(live))
            self._stopped.wait(self.interval)

    def resume(self) -> None:
        """Allow new changes."""
        self._active.set()

    def wait_until_idle(self) -> None:
        """Allow no new change, and return once the current one has its answer."""
        self._active.clear()
        with self._change_lock:
            return

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._active.set()
        self.join(60)

    def make_change(self, site: Site) -> bool:
        """Make one change at a mirror; return whether it was accepted."""
        self._count += 1
        change, arguments = self._choose()
        reply = site.request(change, ANSWER_SECONDS, **arguments)
        if not reply["ok"]:
            self._record_refusal(site, change, reply["error"])
            return False
        self.record_events(site, change, reply)
        if change == "account":
            self._people.append(reply["person"])
        elif change == "run":
            self._runs.append(reply["run"])
        elif change == "ban":
            self._banned.append(arguments["person"])
        return True

    def _record_refusal(self, site: Site, change: str, error: str) -> None:
        self.refused[site.name] += 1
        is_replicated = not any(text in error for text in NOT_REPLICATED_YET)
        if not site.has_fault and site.is_running and is_replicated:
            self.unexpected.append(f"{site.name}: {change}: {error}")

    def record_events(self, site: Site, change: str, reply: dict[str, Any]) -> None:
        """Record all events that the mirror signed meanwhile, including those of its Celery."""
        self.made[site.name] += 1
        for name in reply["events"]:
            self.accepted[name] = (site.name, change)

    def _choose(self) -> tuple[str, dict[str, Any]]:
        """Choose a change and its arguments."""
        name = f"drill-{self._count}-{time.time_ns() % 10**6}"
        change = self._random.choice(CHANGES)
        if change == "rename" and self._people:
            return change, {"person": self._random.choice(self._people), "name": name}
        if change == "ban" and self._people:
            return change, {"person": self._random.choice(self._people)}
        if change == "unban" and self._banned:
            return change, {"person": self._random.choice(self._banned)}
        if change == "settings" and self._runs:
            run = self._random.choice(self._runs)
            return change, {"run": run, "gigabytes": self._random.randint(0, 64)}
        # What cannot be changed yet is created.
        return ("run" if change in ("run", "settings") else "account"), {"name": name}
