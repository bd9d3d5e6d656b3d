"""Upgrade a site while its workers train: old and new programs meet in every combination.

Usage: `make drill-upgrade`, or with `BASELINE=v0.1.0` another release than the newest tag. An old
site is opened by the release's own code. An old worker and a new one enrol, join one run and train
together; the new one therefore works with an old site and an old peer. The owner pauses the run:
with nothing under way, both must have the same updates and the same bits. The new code then takes
over the database at the same address, and both go on; the old worker starts again there, too, and
both are compared once more. The last line is a JSON object. It needs the history of the repository,
so it is no part of `make test`.

How long a stage may take is counted in what the machines do, so that a busy machine fails none. One
that is not reached prints what each machine has and wrote last.
"""

import argparse
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for source in ("platform", "worker", "tests", "benchmarks/shared"):
    sys.path.append(str(ROOT / source))

from released_code import ReleasedCode, extract_code, newest_release  # noqa: E402  (the paths above)

from coordinator.demo.processes import ChildCommand, ProcessGroup  # noqa: E402  (the paths above)
from coordinator.lib.embedded import embedded_servers  # noqa: E402  (the paths above)
from coordinator.lib.free_ports import free_port  # noqa: E402  (the paths above)

EMAIL, PASSWORD = "ida@example.org", "raise-the-frame-7"
CODE = re.compile(r"^\s*code\s+(\S+)$", re.M)  # as `barnraise login` prints it
NEW = ReleasedCode(ROOT, "this version")
REPORT_SECONDS = 1
MAX_STATUSES = 120  # of each machine, one a second at most, until a stage is reached
MAX_PAUSES = 5  # of the run; a long one ends before a machine has all of the other's updates
SILENT_SECONDS = 600.0  # without anything new, after which a stage is given up
RUN = ("--tokens", "500000000", "--quorum", "1", "--report-every", str(REPORT_SECONDS), "--launch")
FIELDS = (
    "text.tokenizer=bytes",
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.context=64",
)
COMMANDS = """
import json
from coordinator.demo import commands
from coordinator.lib import task_queues
queues = (task_queues.TASK_QUEUE, task_queues.WEBHOOK_QUEUE)
found = {"web": commands.web_command(%d), "celery": commands.worker_command(*queues)}
print(json.dumps(found | {"beat": commands.beat_command()}))
"""
MEASURED = """
import sys, torch
from pathlib import Path
from example_hardware import save_example_measurement
torch.set_num_threads(1)
save_example_measurement(Path(sys.argv[1]))
"""
APPROVE = """
from coordinator.accounts.models import Enrolment, User
owner = User.objects.get(email={email!r})
Enrolment.objects.get(code={code!r}).approve(owner).confirm(actor=owner)
"""
CONTROL = """
from coordinator.runs.models import Run
run = Run.objects.get(slug="upgrade")
print(run.{act}(actor=run.owner))
"""
FACTS = """
import json
from coordinator.eventlog import projection
from coordinator.fleet.models import Membership
members = Membership.objects.values("latest", "high_water_mark", "tokens", "machine__hostname")
print(json.dumps({"members": list(members), "state_hash": projection.state_hash()}))
"""
PAGES = ("/", "/runs/", "/runs/{run}/", "/credit/", "/mirrors/", "/download/", "/status", "/teams/")
SIGNED_IN = ("/machines/", "/account/", "/notifications/", "/runs/new/", "/runs/{run}/events/")


@dataclass
class Site:
    """One site and its machines, whose programs change during the drill."""

    folder: Path
    processes: ProcessGroup
    environment: dict[str, str]
    port: int
    code: ReleasedCode
    worker_code: dict[str, ReleasedCode] = field(default_factory=dict)  # by the machine's name

    @property
    def url(self) -> str:
        """The site's address, which the upgrade does not change."""
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Migrate the database with the site's code, start its processes, and wait until ready."""
        self.code.manage(self.environment, "migrate", "--verbosity", "0")
        program = COMMANDS % self.port
        found = self.code.manage(self.environment, "shell", "-v", "0", "-c", program)
        for name, command in json.loads(found.splitlines()[-1]).items():
            self._start(name, self.code, tuple(command), self.environment)
        wait_until(self.is_ready, f"the site of {self.code.name}")

    def close(self) -> None:
        """Stop the site's processes; its machines go on."""
        self.processes.stop("beat", "celery", "web")

    def is_ready(self) -> bool:
        """Return whether all parts of the site work."""
        import httpx

        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def shell(self, program: str) -> str:
        """Run a program in the site's code; return the last line that it prints."""
        output = self.code.manage(self.environment, "shell", "-v", "0", "-c", program)
        return output.splitlines()[-1] if output else ""

    def enrol(self, machine: str, code: ReleasedCode) -> None:
        """Enrol a machine that runs this code, and approve it as its owner would."""
        self.worker_code[machine] = code
        measured = self.folder / f"{machine}.json"
        run_python(code, MEASURED, str(measured))
        self._barnraise(machine, "login", self.url, "--name", machine)
        log = self.processes.logs / f"login-{machine}.log"
        shown = wait_until(lambda: CODE.search(log.read_text()), f"the code of {machine}")
        self.shell(APPROVE.format(email=EMAIL, code=shown[1]))
        login = self.processes.children[f"login-{machine}"]
        wait_until(lambda: login.poll() is not None, f"the enrolment of {machine}")
        if login.returncode:
            raise RuntimeError(log.read_text())

    def join(self, machine: str, run: str) -> None:
        """Let a machine train in the run."""
        self._barnraise(machine, "join", run)

    def stop_worker(self, machine: str) -> None:
        """Let a machine save its work and leave, as Ctrl-C does."""
        self.processes.stop(f"join-{machine}", seconds=60)

    def status(self, machine: str) -> dict[str, Any]:
        """Return what a machine's worker wrote last; {} before the first time."""
        files = list((self.folder / machine / "runs").glob("*/status.json"))
        return json.loads(files[0].read_text()) if files else {}

    def have_exchanged(self) -> bool:
        """Return whether each machine has updates of another one."""
        return all(self.status(name).get("updates_received") for name in self.worker_code)

    def are_at_rest(self) -> bool:
        """Return whether the machines are paused, all with the same updates."""
        statuses = [self.status(machine) for machine in self.worker_code]
        vectors = {status.get("vector") for status in statuses}
        return len(vectors) == 1 and all(each.get("activity") == "paused" for each in statuses)

    def agree(self) -> bool:
        """Return whether machines at rest have the same weights, and each found the other's so."""
        statuses = [self.status(machine) for machine in self.worker_code]
        anchor, *others = {status.get("anchor") for status in statuses}
        have_compared = all(
            any(neighbour["agrees"] for neighbour in status["neighbours"]) for status in statuses
        )
        return anchor is not None and not others and have_compared and self.are_at_rest()

    def control(self, act: str) -> None:
        """Pause or resume the run, as its owner does."""
        if self.shell(CONTROL.format(act=act)) != "True":
            raise RuntimeError(f"{act}: the run's status does not allow it")

    def describe(self, machine: str) -> str:
        """Return what a machine has, and what it wrote last."""
        status = self.status(machine)
        fields = ("activity", "step", "step_seconds", "updates_sent", "updates_received", "waiting")
        shown = {name: status.get(name) for name in (*fields, "vector", "anchor", "neighbours")}
        updates = {}
        for path in (self.folder / machine).glob("runs/*/ledger.sqlite"):
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
                updates |= ledger.execute("SELECT author, max(seq) FROM headers GROUP BY 1")
        log = self.processes.log_tail(f"join-{machine}")
        return f"--- {machine}: {json.dumps(shown)}\nits updates: {updates}\n{log}"

    def is_training(self, machine: str, since: int) -> bool:
        """Return whether a machine has trained further than `since` steps."""
        return self.status(machine).get("step", 0) > since

    def _barnraise(self, machine: str, command: str, *arguments: str) -> None:
        code = self.worker_code[machine]
        environment = {
            "OMP_NUM_THREADS": "1",
            "BARNRAISE_HARDWARE": str(self.folder / f"{machine}.json"),
        }
        home = ("--home", str(self.folder / machine))
        line = (sys.executable, "-m", "barnraise", command, *arguments, *home)
        self._start(f"{command}-{machine}", code, line, environment)

    def _start(
        self, name: str, code: ReleasedCode, command: tuple[str, ...], environment: dict[str, str]
    ) -> None:
        paths = {"PYTHONPATH": code.python_path}
        self.processes.start_child(
            name, ChildCommand(command, {**environment, **paths}, folder=code.root)
        )


def run_python(code: ReleasedCode, program: str, *arguments: str) -> None:
    """Run a program with one version's packages."""
    environment = {**os.environ, "PYTHONPATH": code.python_path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    subprocess.run(command, env=environment, cwd=code.root, check=True)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until the condition returns a true value, and return it.

    Raises:
        TimeoutError: It did not within `SILENT_SECONDS`.
    """
    deadline = time.monotonic() + SILENT_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {SILENT_SECONDS:.0f} s")
        time.sleep(0.3)
    return value


def reaches(site: Site, condition: Callable[[], bool], what: str) -> bool:
    """Return whether a condition comes true while the machines work; else print what they have.

    Each machine may write `MAX_STATUSES` meanwhile.
    """
    written: dict[str, set[float]] = {machine: set() for machine in site.worker_code}
    newest_at = time.monotonic()
    while not condition():
        before = sum(map(len, written.values()))
        for machine, times in written.items():
            times.add(site.status(machine).get("at", 0.0))
        counts = [len(times) for times in written.values()]
        if sum(counts) > before:
            newest_at = time.monotonic()
        ended = site.processes.failed_process()
        is_silent = time.monotonic() > newest_at + SILENT_SECONDS
        if ended or is_silent or min(counts) > MAX_STATUSES:
            reason = f"{ended} ended" if ended else f"not within {counts} statuses"
            print(f"{what}: {reason}", *map(site.describe, written), sep="\n", flush=True)
            return False
        time.sleep(0.3)
    return True


def compare_peers(site: Site) -> bool:
    """Return whether the machines agree once nothing is under way; pause the run for it.

    While rounds last a fraction of a second, the two hardly ever state the same set of updates.
    """
    if not reaches(site, site.have_exchanged, "updates of each other"):
        return False
    has_agreed = False
    for _ in range(MAX_PAUSES):
        site.control("pause")
        if reaches(site, site.are_at_rest, "the same updates during a pause"):
            has_agreed = reaches(site, site.agree, "equal weights during a pause")
        site.control("resume")
        if has_agreed:
            break
    return has_agreed


def count_failed_pages(site: Site, run: str) -> int:
    """Open pages as a visitor and as the owner; return how many answer with a server's error."""
    import httpx

    failed = 0
    with httpx.Client(
        base_url=site.url, follow_redirects=True, headers={"Referer": site.url}, timeout=30
    ) as client:
        for page in PAGES:
            failed += client.get(page.format(run=run)).status_code >= 500
        client.get("/accounts/login/")
        token = client.cookies["csrftoken"]
        fields = {"login": EMAIL, "password": PASSWORD, "csrfmiddlewaretoken": token}
        signed_in = client.post("/accounts/login/", data=fields)
        if "Ida" not in signed_in.text:
            print("Ida cannot sign in after the upgrade", flush=True)
            failed += 1
        for page in SIGNED_IN:
            failed += client.get(page.format(run=run)).status_code >= 500
    return failed


def drill(site: Site, old: ReleasedCode) -> dict[str, Any]:
    """Run all stages; return what the last line says."""
    result: dict[str, Any] = {"baseline": old.name}
    print(f"1. A site of {old.name}, an old worker and a new one", flush=True)
    site.open()
    owner = ("--email", EMAIL, "--password", PASSWORD, "--name", "Ida")
    site.code.manage(site.environment, "prepare_owner", *owner)
    settings = [part for setting in FIELDS for part in ("--set", setting)]
    create = ("create_run", "--owner", EMAIL, "--name", "Upgrade", *RUN, *settings)
    site.code.manage(site.environment, *create)
    site.enrol("old", old)
    site.enrol("new", NEW)
    site.join("old", "upgrade")
    site.join("new", "upgrade")
    result["new_worker_trains_at_old_site"] = reaches(
        site, lambda: site.is_training("new", 0), "steps of the new worker at the old site"
    )
    result["old_and_new_peers_agree"] = compare_peers(site)
    before = json.loads(site.shell(FACTS))

    print("2. The new code takes over the database", flush=True)
    site.close()
    site.code = NEW
    site.open()
    steps = site.status("old")["step"]
    goes_on = reaches(
        site, lambda: site.is_training("old", steps), "steps of the old worker at a new site"
    )
    print("3. The old worker starts again at the new site", flush=True)
    site.stop_worker("old")
    stopped = site.status("old")["step"]
    site.join("old", "upgrade")
    starts = reaches(
        site, lambda: site.is_training("old", stopped), "steps after the old worker's start"
    )
    result["old_worker_trains"] = goes_on and starts
    result["old_and_new_peers_agree"] &= compare_peers(site)
    result["pages_500"] = count_failed_pages(site, "upgrade")
    for machine in site.worker_code:
        site.stop_worker(machine)
    result |= compare(site, before["state_hash"])
    return result


def compare(site: Site, hash_before: str) -> dict[str, Any]:
    """Return which reports are missing, and whether a rebuild finds the old site's state."""

    def missing() -> int:
        members = json.loads(site.shell(FACTS))["members"]
        return sum(
            member["latest"]
            - member["high_water_mark"]
            + (member["tokens"] < site.status(member["machine__hostname"])["tokens"])
            for member in members
        )

    try:
        wait_until(lambda: not missing(), "all reports of both workers in the database")
    except TimeoutError as error:
        print(error, *map(site.describe, site.worker_code), sep="\n", flush=True)
    output = site.code.manage(site.environment, "eventlog", "rebuild").splitlines()
    unchanged = output[0] == "0 aggregates changed"
    if not unchanged:
        print(f"rebuild: {output[0]}; the old site's state was {hash_before}", flush=True)
    return {"reports_lost": missing(), "state_hash_equal": unchanged}


def main() -> int:
    """Run the drill and return 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--baseline", help="a tag or commit; the newest tag without it")
    baseline = parser.parse_args().baseline or newest_release()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="barnraise-upgrade-"))
    folder.chmod(0o755)  # Postgres runs as a user of its own where root runs this
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        old = extract_code(baseline, folder / "code")
        database, valkey = embedded_servers.start(folder / "state", durable=False)
        cleanup.callback(embedded_servers.stop, folder / "state", force=True)
        environment = {
            "DATABASE_URL": database,
            "REDIS_URL": valkey,
            "BARNRAISE_STATE": str(folder / "state"),
            "DJANGO_SETTINGS_MODULE": "coordinator.settings",
        }
        processes = ProcessGroup(folder / "logs")
        cleanup.callback(processes.stop)
        site = Site(folder, processes, environment, free_port(8800), old)
        result = drill(site, old)
    result["seconds"] = round(time.monotonic() - started)
    print(json.dumps(result))
    is_right = all(value for value in result.values() if isinstance(value, bool))
    return 0 if is_right and not result["pages_500"] and not result["reports_lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
