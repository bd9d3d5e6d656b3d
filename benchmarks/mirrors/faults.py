"""Apply faults to a drill's mirrors and check the effects.

Each fault returns one line that describes what was done and what was observed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from child_processes import ChildProcesses, OverdueError
from mirror_site import Site, read_common_state
from network import Loopback, Network
from random_changes import RandomChanges

from barnraise.protocol.signing import digest

# Seconds count in proportion to the share of the machine that others leave: `AvailableClock`.
TARGET_SECONDS = 10.0  # after healing, within which all mirrors must publish one state
MAX_WAIT_SECONDS = 90.0  # after which the drill stops waiting for it
RESTART_SECONDS = 120  # within which a restarted process must answer
HOUR = 3600.0
ACCEPT_SECONDS = 120.0  # within which a site without a fault must accept a change
BUSY_SECONDS = 15.0  # within which Celery works on a burst of events
BURST_EVENTS = 30
BURSTS = 3  # that are tried until Celery is seen at work
CLOCK_WARNING = "this machine's clock is"
Event = dict[str, Any]


@dataclass(frozen=True)
class Durations:
    """Seconds that each phase of the drill takes, at least: its effects are waited for."""

    steady: float = 25.0
    killed: float = 25.0  # a mirror
    cut: float = 60.0
    server: float = 15.0  # without Postgres or Valkey
    full_disk: float = 25.0
    wrong_clock: float = 45.0
    between_faults: float = 24.0


QUICK = Durations(
    steady=8.0,
    killed=8.0,
    cut=20.0,
    server=6.0,
    full_disk=8.0,
    wrong_clock=15.0,
    between_faults=2.0,
)


@dataclass
class Faults:
    """Apply faults, one after another.

    Attributes:
        converged: Fault → seconds from its healing until all mirrors published one state, in
            proportion to the share of the machine that others left.
        converged_wall: The same by an ordinary clock.
        missed: A sentence for each requirement that was not met.
        answers: Attack → how it was answered.
    """

    drill: ChildProcesses
    sites: list[Site]
    changes: RandomChanges
    network: Network | Loopback
    durations: Durations
    converged: dict[str, float] = field(default_factory=dict)
    converged_wall: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)

    # ---- shared by all faults

    def measure_convergence(self, name: str) -> float:
        """Return the seconds until all mirrors publish one state, with no changes meanwhile."""
        self.changes.wait_until_idle()
        started = time.monotonic()
        seconds = self.wait_or_miss(
            lambda: read_common_state(self.sites), f"one state after {name}", MAX_WAIT_SECONDS
        )
        self.converged[name] = round(seconds, 1)
        self.converged_wall[name] = round(time.monotonic() - started, 1)
        if seconds > TARGET_SECONDS:
            self.missed.append(
                f"{name}: one state only {seconds:.1f} s after healing, not {TARGET_SECONDS:.0f}"
            )
        self.changes.resume()
        return seconds

    def wait_or_miss(
        self, condition: Callable[[], object], description: str, seconds: float
    ) -> float:
        """Wait for a condition; return the seconds, or all of them if the requirement is missed."""
        try:
            return self.drill.wait_until(condition, description, seconds)
        except OverdueError as error:
            self.missed.append(str(error))
            return seconds

    def require(self, name: str, is_met: object, otherwise: str) -> None:
        """Record a missed requirement unless it is met."""
        if not is_met:
            self.missed.append(f"{name}: {otherwise}")

    def _accepted_changes(self) -> int:
        return sum(self.changes.made.values())

    def _wait_for_changes(self, seconds: float, *accepted: Callable[[], int]) -> None:
        """Wait for so many seconds, and until each of these numbers of changes has grown."""
        before = [count() for count in accepted]
        self.drill.sleep(seconds)
        self.wait_or_miss(
            lambda: all(count() > old for count, old in zip(accepted, before, strict=True)),
            "changes that are accepted during the fault",
            ACCEPT_SECONDS,
        )

    # ---- the faults

    def do_nothing(self) -> str:
        """Wait without a fault."""
        self._wait_for_changes(self.durations.steady, self._accepted_changes)
        seconds = self.measure_convergence("nothing")
        accepted = self._accepted_changes()
        return f"{accepted} changes were accepted; one state {seconds:.1f} s after the last"

    def kill_mirror(self, site: Site) -> str:
        """Kill a mirror's web server and Celery, and start them again."""
        before = self._accepted_changes()
        site.has_fault = True
        site.kill()
        self._wait_for_changes(self.durations.killed, self._accepted_changes)
        elsewhere = self._accepted_changes() - before
        site.start()
        start_seconds = self.drill.wait_until(site.answers, f"{site.name} again", RESTART_SECONDS)
        site.has_fault = False
        seconds = self.measure_convergence(f"{site.name} killed")
        self.require(f"{site.name} killed", elsewhere, "the others accepted nothing meanwhile")
        return (
            f"web and Celery by SIGKILL, for {self.durations.killed:.0f} s: the others accepted "
            f"{elsewhere} changes; back in {start_seconds:.1f} s, one state {seconds:.1f} s later"
        )

    def cut_off_mirror(self, number: int) -> str:
        """Drop all packets to and from a mirror for a time."""
        site = self.sites[number]
        before = self.changes.made.copy()
        if not isinstance(self.network, Network):
            self.missed.append("cut off: not done, there are no network namespaces here")
            return "not done: it takes Linux and root"
        self.network.cut(number)
        self._wait_for_changes(
            self.durations.cut,
            lambda: self.changes.made[site.name],
            lambda: self._accepted_changes() - self.changes.made[site.name],
        )
        self.changes.wait_until_idle()
        here = self.changes.made[site.name] - before[site.name]
        elsewhere = self._accepted_changes() - sum(before.values()) - here
        differed = len({each.require("state")["state"] for each in self.sites}) > 1
        self.network.heal(number)
        seconds = self.measure_convergence("cut off")
        self.require(
            "cut off",
            here and elsewhere and differed,
            f"both sides must accept changes and differ: {here} and {elsewhere} changes",
        )
        return (
            f"every packet to and from {site.name} lost for {self.durations.cut:.0f} s: "
            f"it accepted {here} changes, the others {elsewhere}, and they differed; "
            f"one state {seconds:.1f} s after healing"
        )

    def kill_postgres(self, site: Site) -> str:
        """Kill a mirror's Postgres, and start it again."""
        return self._kill_server(site, "Postgres", site.kill_postgres)

    def kill_valkey(self, site: Site) -> str:
        """Kill a mirror's Valkey, and start it again."""
        return self._kill_server(site, "Valkey", site.kill_valkey)

    def _kill_server(self, site: Site, server: str, kill: Callable[[], int]) -> str:
        name = f"without {server}"
        site.has_fault = True
        accepted_before = self._accepted_changes()
        refused_before = self.changes.refused[site.name]
        processes = kill()
        self._wait_for_changes(self.durations.server, self._accepted_changes)
        accepted = self._accepted_changes() - accepted_before
        refused = self.changes.refused[site.name] - refused_before
        site.restart_servers()
        self.drill.wait_until(site.answers, f"{site.name} with {server}", RESTART_SECONDS)
        self.drill.wait_until(
            lambda: site.request("state")["ok"], f"{site.name}'s load driver with {server}", 60
        )
        site.has_fault = False
        seconds = self.measure_convergence(name)
        self.require(name, accepted, "no mirror accepted anything meanwhile")
        self.require(name, site.is_running, "a process of the site has died of it")
        return (
            f"{processes} processes by SIGKILL, started again after {self.durations.server:.0f} s: "
            f"{accepted} changes were accepted meanwhile and {refused} refused there; one state "
            f"{seconds:.1f} s later"
        )

    def kill_busy_celery(self, site: Site) -> str:
        """Kill a mirror's Celery in the middle of a task, and start it again."""
        other = next(each for each in self.sites if each is not site)
        self.changes.wait_until_idle()
        if self._wait_for_busy_celery(site, other):
            moment = "in the middle of a task"
        else:
            moment = "between two tasks: it was never caught in one"
            self.missed.append("Celery in mid-task: it was never caught in one")
        site.kill_celery()
        self.changes.resume()
        self.drill.sleep(self.durations.server)
        site.start_celery()
        start_seconds = self.drill.wait_until(
            lambda: site.require("celery")["works"], f"{site.name}'s Celery again", RESTART_SECONDS
        )
        seconds = self.measure_convergence("Celery killed")
        return (
            f"killed {moment}, started again after {self.durations.server:.0f} s and back in "
            f"{start_seconds:.1f} s: one state {seconds:.1f} s later"
        )

    def _wait_for_busy_celery(self, site: Site, other: Site) -> bool:
        """Make bursts of events at another mirror until the site's Celery works on one."""
        for _ in range(BURSTS):
            for number in range(BURST_EVENTS):
                reply = other.require("account", name=f"burst-{number}-{time.time_ns()}")
                self.changes.record_events(other, "account", reply)
            try:
                self.drill.wait_until(site.is_celery_busy, "Celery's work", BUSY_SECONDS)
            except OverdueError:
                continue
            return True
        return False

    def fill_disk(self, site: Site, folder: Path) -> str:
        """Fill the disk of a mirror's database.

        Args:
            site: The mirror.
            folder: A small file system that contains only the database.
        """
        site.has_fault = True
        accepted_before = self._accepted_changes()
        ballast = folder / "ballast"
        size = _fill_file_system(ballast)
        error = ""
        clock = self.drill.clock
        start = clock.now()
        # Until it has refused something; if it refuses nothing, not for ever.
        while (seconds := clock.now() - start) < self.durations.full_disk or (
            not error and seconds < ACCEPT_SECONDS
        ):
            reply = site.request("account", 20.0, name=f"full-{time.time_ns()}")
            if reply["ok"]:
                self.changes.record_events(site, "account", reply)
            else:
                error = reply["error"]
            time.sleep(0.1 if reply["ok"] else 0.5)
        accepted = self._accepted_changes() - accepted_before
        ballast.unlink()
        site.restart_servers()
        self.drill.wait_until(
            lambda: site.answers() and site.request("state")["ok"],
            f"{site.name} with free space",
            RESTART_SECONDS,
        )
        site.has_fault = False
        seconds = self.measure_convergence("full disk")
        self.require("full disk", error, "it refused nothing: was it full?")
        return (
            f"{size >> 20} MB filled the disk of its database for {self.durations.full_disk:.0f} s:"
            f" it refused with “{' '.join(error.split())[:90]}”, {accepted} changes were accepted, "
            f"most elsewhere; one state {seconds:.1f} s after there was room"
        )

    def set_wrong_clock(self, site: Site) -> str:
        """Run a mirror's processes, except for the servers, with a clock an hour ahead."""
        wrong = _clock_an_hour_ahead()
        if wrong is None:
            self.missed.append("a wrong clock: not done, libfaketime does not load here")
            return "not done: libfaketime does not load here"
        name = "a wrong clock"
        self._restart_with(site, **wrong)
        self.changes.resume()
        made_before = self.changes.made[site.name]
        self._wait_for_changes(self.durations.wrong_clock, lambda: self.changes.made[site.name])
        self.changes.wait_until_idle()
        reply = site.require("clock")
        clock_ahead = reply["time"] - time.time()
        events_ahead = reply["event_time"] - time.time()
        made = self.changes.made[site.name] - made_before
        seconds = self.measure_convergence(name)
        was_logged = site.log_contains(CLOCK_WARNING)
        self._restart_with(site)
        self.measure_convergence("the right clock again")
        is_hour = abs(clock_ahead - HOUR) < 60
        self.require(name, is_hour, f"its clock was {clock_ahead:.0f} s ahead")
        self.require(name, events_ahead < 60, f"its events are stamped {events_ahead:.0f} s ahead")
        self.require(name, made, "it accepted nothing")
        logged = "its log says so" if was_logged else "its log does not say so"
        return (
            f"its processes lived {clock_ahead:,.0f} s ahead: it accepted {made} changes, stamped "
            f"{events_ahead:+.0f} s from the others' time, and {logged}; one state {seconds:.1f} s "
            "after"
        )

    def _restart_with(self, site: Site, **environment: str) -> None:
        """Restart the mirror's processes; changes wait until it knows the others' time."""
        self.changes.wait_until_idle()
        site.kill()
        site.stop_load_driver()
        site.start(**environment)
        site.start_load_driver(**environment)
        self.drill.wait_until(site.answers, f"{site.name} again", RESTART_SECONDS)
        site.require("token")
        if environment:
            self.drill.wait_until(
                lambda: abs(site.require("state")["offset"]) > 60, "the others' time there", 60
            )

    # ---- attacks

    def attack(self, first: Site, second: Site, liar: Site) -> str:
        """Send replayed, altered and foreign events to `first`; `liar` signs two versions of a log.

        Of those `first` receives one, and `second` the other.
        """
        self.changes.wait_until_idle()
        bad_events = self._send_bad_events(first)
        bad_events += self._fork_log(first, second, liar)
        reply = liar.require("account", name=f"after-{time.time_ns()}")
        self.changes.record_events(liar, "account", reply)  # its own log continues
        seconds = self.measure_convergence("equivocation")
        bad_digests = [digest(event["body"]) for event in bad_events]
        believers = [
            site.name
            for site in self.sites
            if len(site.require("missing_events", digests=bad_digests)["missing"])
            < len(bad_digests)
        ]
        self.require("hostile", not believers, f"some of it counts at {believers}")
        observed = "; ".join(
            f"{name}: {answer or 'NOT REFUSED'}" for name, answer in self.answers.items()
        )
        return f"{observed}; one state {seconds:.1f} s later"

    def _send_bad_events(self, site: Site) -> list[Event]:
        """Send a replayed event, an altered one and a log by an unknown key.

        Returns:
            The events that must count nowhere.
        """
        signed = site.require("sample")["signed"]
        replayed = site.require("receive", signed=[signed])
        is_harmless = not replayed["stored"] and not replayed["refused"]
        self._record_answer("a replayed event", "changes nothing" if is_harmless else "")
        altered = {**signed, "body": signed["body"].replace('"seq":', '"seq": ', 1)}
        answer = site.require("receive_altered", signed=altered)
        self._record_answer("an altered event", " ".join(answer["refused"]))
        forged = site.require("forge_log")["signed"]
        answer = site.require("receive", signed=forged)
        self._record_answer("a stranger's log", " ".join(answer["refused"]))
        return [altered, *forged]

    def _fork_log(self, first: Site, second: Site, liar: Site) -> list[Event]:
        """Send two versions of a log to two mirrors; all three must obtain the proof.

        Returns:
            The two events with one number, which must count nowhere.
        """
        fork = liar.require("equivocate")
        for site, version in ((first, fork["first"]), (second, fork["second"])):
            answer = site.require("receive", signed=version)
            # The other version may have arrived here before this one.
            is_plausible = answer["stored"] == 2 or answer["forked"]
            self.require(
                "equivocation", is_plausible, f"{site.name} should accept it at first: {answer}"
            )
        seconds = self.wait_or_miss(
            lambda: all(
                fork["origin"] in site.require("fork_proofs")["origins"] for site in self.sites
            ),
            "the proof",
            60,
        )
        self._record_answer(
            "a member's two events with one number",
            f"proven at all three in {seconds:.1f} s, and withdrawn",
        )
        return [fork["first"][1], fork["second"][1]]

    def _record_answer(self, name: str, answer: str) -> None:
        self.answers[name] = answer
        self.require(name, answer, "was not refused")


def _fill_file_system(ballast: Path) -> int:
    """Write a file until its file system is full; return the file's size in bytes."""
    with ballast.open("wb") as file:
        try:
            while True:
                file.write(b"\0" * (1 << 20))
                file.flush()
        except OSError:
            return ballast.stat().st_size


def _clock_an_hour_ahead() -> dict[str, str] | None:
    """Return the environment whose processes live an hour ahead; None if that does not work."""
    found = find_spec("libfaketime")
    if found is None or found.origin is None:
        return None
    library = Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    environment = {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"+{HOUR:.0f}s",
        "DONT_FAKE_MONOTONIC": "1",
        # Otherwise threads that wait for Python's interpreter lock spin and use a core.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }
    probe = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    works = probe.returncode == 0 and abs(float(probe.stdout) - time.time() - HOUR) < 60
    return environment if works else None
