"""What people decide at the mirrors while a drill goes on: one thing after the other, each at a random live one."""

import random
import threading
import time
from collections import Counter
from typing import Any

from mirror_site import Site

KINDS = ("account", "account", "rename", "ban", "unban", "run", "settings", "settings")
ELSEWHERE = (
    "matching query does not exist",
    "ValueError: 404",
)  # it has not come to this mirror yet


class Changes(threading.Thread):
    """`accepted`: digest of an event → (mirror, what was done). A change that a mirror refused, or to which no answer
    came, is counted and promised to nobody. `hold` until `go` nothing new is begun."""

    def __init__(self, sites: list[Site], every: float, seed: int):
        super().__init__(name="changes", daemon=True)
        self.sites, self.every, self.dice = sites, every, random.Random(seed)
        self.accepted: dict[str, tuple[str, str]] = {}
        self.made: Counter[str] = Counter()  # by mirror, those that were accepted
        self.refused: Counter[str] = Counter()
        self.unexpected: list[str] = []  # refusals by a mirror that was up
        self._people: list[str] = []
        self._banned: list[str] = []
        self._runs: list[str] = []
        self._going, self._ended = threading.Event(), threading.Event()
        self._one = threading.Lock()  # held while one is made
        self._count = 0

    def run(self) -> None:
        while not self._ended.is_set():
            self._going.wait(0.2)
            if self._going.is_set() and (live := [site for site in self.sites if site.is_running]):
                with self._one:
                    if self._going.is_set():
                        self.make_change(self.dice.choice(live))
            self._ended.wait(self.every)

    def go(self) -> None:
        self._going.set()

    def wait_until_idle(self) -> None:
        """Returns once the last one is through."""
        self._going.clear()
        with self._one:
            return

    def end(self) -> None:
        self._ended.set()
        self._going.set()
        self.join(60)

    def make_change(self, site: Site) -> bool:
        """One change there. Whether it was accepted."""
        self._count += 1
        kind, what = self._chosen()
        said = site.request(kind, 20.0, **what)
        if not said["ok"]:
            self.refused[site.name] += 1
            known_elsewhere = "matching query does not exist" in said["error"] or said[
                "error"
            ].startswith("ValueError: 404")
            if not site.afflicted and site.is_running and not known_elsewhere:
                self.unexpected.append(f"{site.name}: {kind}: {said['error']}")
            return False
        self.record_events(site, kind, said)
        if kind == "account":
            self._people.append(said["person"])
        elif kind == "run":
            self._runs.append(said["run"])
        elif kind == "ban":
            self._banned.append(what["person"])
        return True

    def record_events(self, site: Site, kind: str, said: dict[str, Any]) -> None:
        """All that this mirror signed meanwhile, Celery's own included."""
        self.made[site.name] += 1
        for name in said["events"]:
            self.accepted[name] = (site.name, kind)

    def _chosen(self) -> tuple[str, dict[str, Any]]:
        name, kind = f"drill-{self._count}-{time.time_ns() % 10**6}", self.dice.choice(KINDS)
        if kind in ("rename", "ban") and self._people:
            who = {"person": self.dice.choice(self._people)}
            return kind, who | ({"name": name} if kind == "rename" else {})
        if kind == "unban" and self._banned:
            return kind, {"person": self.dice.choice(self._banned)}
        if kind == "settings" and self._runs:
            return kind, {
                "run": self.dice.choice(self._runs),
                "gigabytes": self.dice.randint(0, 64),
            }
        return (
            ("run", {"name": name}) if kind in ("run", "settings") else ("account", {"name": name})
        )
