"""What is done to a drill's mirrors, and what must be seen of it. Each says in one line what it did and what it saw."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mirror_site import Site, until
from network import Network
from random_changes import Changes

from barnraise.protocol.signing import digest
from coordinator.demo.mirrors import CELERY, SITE, common_state_hash

HEALED = 10.0  # seconds after healing in which all must say the same
PATIENCE = 90.0  # seconds after which the drill gives up on it
HOUR = 3600.0


@dataclass(frozen=True)
class Span:
    """Seconds."""

    steady: float = 25.0
    dead: float = 25.0  # a mirror that was killed
    cut: float = 60.0
    server: float = 15.0  # without Postgres, or Valkey
    full: float = 25.0
    clock: float = 45.0
    between: float = 24.0  # two faults


QUICK = Span(steady=8.0, dead=8.0, cut=20.0, server=6.0, full=8.0, clock=15.0, between=2.0)


@dataclass
class Faults:
    """`converged`: fault → seconds from its healing until all mirrors said the same; `missed`: what was not as it must
    be, by name."""

    sites: list[Site]
    changes: Changes
    network: Any
    span: Span
    converged: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # hostile thing → what it was answered

    # ---- what all have in common

    def heal(self, name: str) -> float:
        """Measure how long all mirrors take to publish one state after the last fault and change."""
        self.changes.wait_until_idle()
        took = self.within(
            lambda: common_state_hash(self.sites), f"one state after {name}", PATIENCE
        )
        self.converged[name] = round(took, 1)
        if took > HEALED:
            self.missed.append(
                f"{name}: one state only {took:.1f} s after healing, not {HEALED:.0f}"
            )
        self.changes.go()
        return took

    def within(self, done: Callable[[], object], what: str, seconds: float) -> float:
        """Seconds until this was so; all of them where it never was, which is missed."""
        try:
            return until(done, what, seconds)
        except TimeoutError as error:
            self.missed.append(str(error))
            return seconds

    def must(self, name: str, held: object, otherwise: str) -> None:
        if not held:
            self.missed.append(f"{name}: {otherwise}")

    def _accepted(self) -> int:
        return sum(self.changes.made.values())

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    # ---- one fault each; they return what was seen

    def nothing(self) -> str:
        self.rest(self.span.steady)
        return f"{self._accepted()} changes were accepted; one state {self.heal('nothing'):.1f} s after the last"

    def killed(self, site: Site) -> str:
        before, site.afflicted = self._accepted(), True
        site.kill()
        self.rest(self.span.dead)
        elsewhere = self._accepted() - before
        site.start()
        back = until(site.answers, f"{site.name} again", 120)
        site.afflicted = False
        took = self.heal(f"{site.name} killed")
        self.must(f"{site.name} killed", elsewhere, "the others accepted nothing meanwhile")
        return (f"web and Celery by SIGKILL, for {self.span.dead:.0f} s: the others accepted {elsewhere} changes; back "
                f"in {back:.1f} s, one state {took:.1f} s later")  # fmt: skip

    def cut_off(self, number: int) -> str:
        site, before = self.sites[number], self.changes.made.copy()
        if not isinstance(self.network, Network):
            self.missed.append("cut off: not done, there are no network namespaces here")
            return "not done: it takes Linux and root"
        self.network.cut(number)
        self.rest(self.span.cut)
        self.changes.wait_until_idle()
        here = self.changes.made[site.name] - before[site.name]
        there = self._accepted() - sum(before.values()) - here
        apart = len({each.require("state")["state"] for each in self.sites}) > 1
        self.network.heal(number)
        took = self.heal("cut off")
        self.must(
            "cut off",
            here and there and apart,
            f"both sides must have gone on: {here} and {there} changes",
        )
        return (f"every packet to and from {site.name} lost for {self.span.cut:.0f} s: it accepted {here} changes, the "
                f"others {there}, and they differed; one state {took:.1f} s after healing")  # fmt: skip

    def without_postgres(self, site: Site) -> str:
        return self._without(site, "Postgres", site.kill_postgres)

    def without_valkey(self, site: Site) -> str:
        return self._without(site, "Valkey", site.kill_valkey)

    def _without(self, site: Site, what: str, kill: Any) -> str:
        site.afflicted = True
        before, refused = self._accepted(), self.changes.refused[site.name]
        processes = kill()
        self.rest(self.span.server)
        meanwhile, refused = self._accepted() - before, self.changes.refused[site.name] - refused
        site.restart_servers()
        until(site.answers, f"{site.name} with {what}", 120)
        until(lambda: site.request("state")["ok"], f"{site.name}'s clerk with {what}", 60)
        site.afflicted = False
        took = self.heal(f"without {what}")
        self.must(f"without {what}", meanwhile, "nobody accepted anything meanwhile")
        self.must(f"without {what}", site.is_running, "a process of the site has died of it")
        return (f"{processes} processes by SIGKILL, started again after {self.span.server:.0f} s: {meanwhile} changes "
                f"were accepted meanwhile and {refused} refused there; one state {took:.1f} s later")  # fmt: skip

    def celery_in_mid_task(self, site: Site) -> str:
        other = next(each for each in self.sites if each is not site)
        self.changes.wait_until_idle()
        for number in range(30):  # something to pull
            said = other.require("account", name=f"burst-{number}-{time.time_ns()}")
            self.changes.record_events(other, "account", said)
        try:
            until(site.is_working, "Celery in the middle of a task", 15)
            busy = "in the middle of a task"
        except TimeoutError:
            busy = "between two tasks: it was never caught in one"
            self.missed.append("Celery in mid-task: it was never caught in one")
        site.kill_celery()
        self.changes.go()
        self.rest(self.span.server)
        site.start_celery()
        back = until(lambda: site.require("celery")["works"], f"{site.name}'s Celery again", 120)
        took = self.heal("Celery killed")
        return (f"killed {busy}, started again after {self.span.server:.0f} s and back in {back:.1f} s: one state "
                f"{took:.1f} s later")  # fmt: skip

    def full_disk(self, site: Site, folder: Path) -> str:
        """`folder` is a small file system of its own, with the mirror's database in it."""
        site.afflicted = True
        before, refused = self._accepted(), self.changes.refused[site.name]
        ballast = folder / "ballast"
        with ballast.open("wb") as file:
            try:
                while True:
                    file.write(b"\0" * (1 << 20))
                    file.flush()
            except OSError:
                size = ballast.stat().st_size
        sentence, deadline = "", time.monotonic() + self.span.full
        while time.monotonic() < deadline:
            said = site.request("account", 20.0, name=f"full-{time.time_ns()}")
            if said["ok"]:
                self.changes.record_events(site, "account", said)
            else:
                sentence = said["error"]
            time.sleep(0.1 if said["ok"] else 0.5)
        meanwhile, refused = self._accepted() - before, self.changes.refused[site.name] - refused
        ballast.unlink()
        site.restart_servers()
        until(lambda: site.answers() and site.request("state")["ok"], f"{site.name} with room", 120)
        site.afflicted = False
        took = self.heal("full disk")
        self.must("full disk", sentence, "it refused nothing: was it full?")
        words = " ".join(sentence.split())[:90]
        return (f"{size >> 20} MB filled the last byte beside its database for {self.span.full:.0f} s: it refused with "
                f"“{words}”, {meanwhile} changes were accepted, most elsewhere; one state {took:.1f} s after "
                "there was room")  # fmt: skip

    def wrong_clock(self, site: Site) -> str:
        """All its processes but the servers live an hour ahead, by libfaketime; then they live now again."""
        wrong = _an_hour_ahead()
        if wrong is None:
            self.missed.append("a wrong clock: not done, libfaketime does not load here")
            return "not done: libfaketime does not load here"
        self._again(site, **wrong)
        self.changes.go()
        before = self.changes.made[site.name]
        self.rest(self.span.clock)
        self.changes.wait_until_idle()
        said = site.require("stamped")
        ahead, stamped = said["clock"] - time.time(), said["hlc"] - time.time()
        mine = self.changes.made[site.name] - before
        took = self.heal("a wrong clock")
        alarmed = site.log_contains(SITE, "this machine's clock is") or site.log_contains(
            CELERY, "this machine's clock is"
        )
        self.changes.wait_until_idle()
        self._again(site)
        self.heal("the right clock again")
        self.must("a wrong clock", abs(ahead - HOUR) < 60, f"its clock was {ahead:.0f} s ahead")
        self.must("a wrong clock", stamped < 60, f"its events are stamped {stamped:.0f} s ahead")
        self.must("a wrong clock", mine, "it accepted nothing")
        alarm = "its log says so" if alarmed else "its log does not say so"
        return (f"its processes lived {ahead:,.0f} s ahead: it accepted {mine} changes, stamped {stamped:+.0f} s from "
                f"the others' time, and {alarm}; one state {took:.1f} s after")  # fmt: skip

    def _again(self, site: Site, **environment: str) -> None:
        """Restart the mirror's processes; changes wait until it has pulled from the others once."""
        self.changes.wait_until_idle()
        site.kill()
        site.dismiss()
        site.start(**environment)
        site.start_clerk(**environment)
        until(site.answers, f"{site.name} again", 120)
        site.require("token")
        until(
            lambda: abs(site.require("state")["off"]) > 60 or not environment,
            "its hearing of the others' time",
            60,
        )

    def hostile(self, one: Site, other: Site, liar: Site) -> str:
        """Replays, alterations and a stranger's log at `one`; and `liar` signs two events with one number."""
        self.changes.wait_until_idle()
        signed = one.require("sample")["signed"]
        again = one.require("receive", signed=[signed])
        self._note(
            "a replayed event",
            "changes nothing" if not again["stored"] and not again["refused"] else "",
        )
        altered = {**signed, "body": signed["body"].replace('"seq":', '"seq": ', 1)}
        self._note("an altered event", " ".join(one.require("altered", signed=altered)["refused"]))
        forged = one.require("forge")["signed"]
        self._note("a stranger's log", " ".join(one.require("receive", signed=forged)["refused"]))
        lie = liar.require("equivocate")
        for site, told in ((one, lie["one"]), (other, lie["other"])):
            found = site.require("receive", signed=told)
            believed = (
                found["stored"] == 2 or found["forked"]
            )  # the other story may have come here before this one
            self.must("equivocation", believed, f"{site.name} was to believe it at first: {found}")
        took = self.within(
            lambda: all(lie["origin"] in each.require("proofs")["origins"] for each in self.sites),
            "the proof",
            60,
        )
        self._note(
            "a member's two events with one number",
            f"proven at all three in {took:.1f} s, and withdrawn",
        )
        said = liar.require("account", name=f"after-{time.time_ns()}")
        self.changes.record_events(liar, "account", said)  # its own log goes on
        took = self.heal("equivocation")
        wrong = [
            digest(each["body"]) for each in (altered, *forged, lie["one"][1], lie["other"][1])
        ]
        kept = [
            each.name
            for each in self.sites
            if len(each.require("lacks", digests=wrong)["lacks"]) < len(wrong)
        ]
        self.must("hostile", not kept, f"something of it counts at {kept}")
        seen = "; ".join(
            f"{name}: {answer or 'NOT REFUSED'}" for name, answer in self.answers.items()
        )
        return f"{seen}; one state {took:.1f} s later"

    def _note(self, name: str, answer: str) -> None:
        self.answers[name] = answer
        self.must(name, answer, "was not refused")


def _an_hour_ahead() -> dict[str, str] | None:
    """What makes a process live an hour ahead; None where that does not work."""
    found = find_spec("libfaketime")
    if found is None or found.origin is None:
        return None
    library = Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    told = {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"+{HOUR:.0f}s",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # else threads that wait for the interpreter spin: a core is gone
    }
    look = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"], env={**os.environ, **told}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    works = look.returncode == 0 and abs(float(look.stdout) - time.time() - HOUR) < 60
    return told if works else None
