"""Run two real mirrors with their own servers, databases and keys, which share only HTTP."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
from helpers.paths import ROOT, TESTS
from helpers.site import migrated_database
from helpers.site.management import manage

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.protocol.coordinator_messages import JoinRequest, Reports
from barnraise.protocol.enums import Activity
from barnraise.protocol.reports import MeasuredLoss, Report
from barnraise.protocol.signing import Identity
from coordinator.demo.commands import web_command
from coordinator.demo.processes import ProcessGroup
from coordinator.lib.free_ports import ReservedPort

GOLDEN = ROOT / "tests" / "contract" / "golden" / "reports.json"
PASSWORD = "raise-the-frame-7"
TASKS_LOOP = """
import time
from coordinator.telemetry import rollup, tasks
from coordinator.telemetry.remote import pull
while True:
    rollup.drain_queue(wait=True)
    pull.pull_all()
    tasks.advance_runs()
    time.sleep(1)
"""


class MirrorProcess:
    """Run one mirror's web server, its tasks and its management commands."""

    def __init__(self, name: str, folder: Path, valkey: int):
        self.name = name
        self.reserved_port = ReservedPort()
        self.port = self.reserved_port.number
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / name).mkdir()
        self.processes = ProcessGroup(folder / name / "logs")
        self.environment = {
            "DATABASE_URL": migrated_database.database_url(f"mirror_{name}"),
            "REDIS_URL": re.sub(r"/0$", f"/{valkey}", os.environ["REDIS_URL"]),
            "BARNRAISE_STATE": str(folder / name),
            "BARNRAISE_NAME": f"Mirror {name}",
        }

    def manage(self, *command: str, fails: bool = False) -> str:
        """Run a management command and return its output; `fails` expects it to fail."""
        return manage(self.environment, *command, fails=fails)

    def shell(self, code: str) -> str:
        """Run Python code in Django's shell and return the last line that it prints."""
        return self.manage("shell", "-v", "0", "-c", code).splitlines()[-1]

    def start(self) -> None:
        """Start the web server and wait until it answers."""
        self.reserved_port.release()
        self.processes.start("site", *web_command(self.port), **self.environment)
        end = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{self.url}/api/v1/mirror", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                assert time.monotonic() < end, self.processes.log_tail("site")
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill the web server."""
        site = self.processes.children.pop("site")
        site.kill()
        site.wait()

    def snapshot(self, run: str) -> dict:
        """Fetch the snapshot of a run's page."""
        answer = httpx.get(f"{self.url}/live/{run}/", timeout=30)
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()

    def start_tasks(self) -> None:
        """Run what Celery would run every second or two, until the test ends."""
        command = (str(ROOT / "manage.py"), "shell", "-v", "0", "-c", TASKS_LOOP)
        self.processes.start("tasks", sys.executable, *command, **self.environment)


@contextmanager
def two_mirrors(folder: Path) -> Iterator[list[MirrorProcess]]:
    """Yield two mirrors with their tables; the fixture `state` runs Postgres and Valkey."""
    mirrors = [MirrorProcess("a", folder, 2), MirrorProcess("b", folder, 3)]
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        try:
            for site in mirrors:
                migrated_database.create_database(f"mirror_{site.name}")
            yield mirrors
        finally:
            for site in mirrors:
                site.processes.stop()
                connection.execute(f"DROP DATABASE IF EXISTS mirror_{site.name} WITH (FORCE)")


PUBLISH_LIST = """
import re
from io import StringIO
from django.core.management import call_command


def mirror_list(*command):
    output = StringIO()
    call_command("mirror_list", *command, stdout=output)
    return output.getvalue()


key = mirror_list("keygen", {root!r}).strip()
mirror_list(
    "begin", "--url", {url!r}, "--name", "A", "--root", key, "--threshold", "1", "--to", {file!r}
)
mirror_list("add", "--key", {other_key!r}, "--url", {other_url!r}, "--name", "B", "--to", {file!r})
mirror_list("sign", {file!r}, "--key", {root!r})
mirror_list("publish", {file!r}, "--first")
print(re.search(r"BLAKE3 (\\w{{64}})", mirror_list("show"))[1])
"""


def publish_list(a: MirrorProcess, b: MirrorProcess, folder: Path) -> str:
    """Publish a mirror list of both at the first mirror and return its digest."""
    file, root = str(folder / "list.json"), str(folder / "root")
    other_key = b.shell(
        "from coordinator.lib import site_identity; print(site_identity.identity().key)"
    )
    names = {"url": a.url, "root": root, "file": file, "other_key": other_key, "other_url": b.url}
    return a.shell(PUBLISH_LIST.format(**names))


CREATE_RUN = """
import json, sys
sys.path.append({tests!r})
from django.core.management import call_command
from helpers.site.page_fixtures import create_launched_run, create_machine
from coordinator.accounts.models import User
from coordinator.fleet.join import admit_machine
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.runs import models
from coordinator.runs.spec_form import spec_from_fields
from barnraise.protocol.coordinator_messages import JoinRequest
call_command("prepare_owner", email="ida@example.org", password={password!r}, name="Ida")
ida = User.objects.get(name="Ida")
barn, signer = create_machine(ida, "barn", 1)
create_machine(ida, "loft", 2)
budget = {{"recipe.token_budget": "100000"}}
run = create_launched_run(ida, "Two roofs", signer, report_every=1.0, **budget)
admit_machine(run, barn, JoinRequest(version="0.1", addresses=["192.0.2.7:41000"]))
run.refresh_from_db()
advance_run(run)
draft = models.Run.create(ida, models.NewRun("A draft", spec_from_fields({{}})))
print(json.dumps({{"run": str(run.pk), "draft": draft.slug}}))
"""


def create_run(site: MirrorProcess) -> dict[str, str]:
    """Create Ida, two machines of hers, a run in training and a draft.

    Returns:
        {"run": the run's id, "draft": the draft's slug}.
    """
    return json.loads(site.shell(CREATE_RUN.format(tests=str(TESTS), password=PASSWORD)))


class ReportingMachine:
    """Send reports in the name of one of Ida's machines, given by the seed of its key."""

    def __init__(self, seed: int):
        self.identity = Identity(bytes([seed]) * 32)

    def send_reports(
        self, site: MirrorProcess, run: str, *numbers: int, joined: bool = False, **changed
    ) -> None:
        """Send reports with these numbers to a site, after joining unless it has `joined`."""
        client = CoordinatorClient(site.url, self.identity)
        client.pin_mirror()
        if not joined:
            client.join_run(run, JoinRequest(version="1", addresses=["192.0.2.7:41000"]))
        client.send_reports(run, [self.report(number, **changed) for number in numbers])
        client.close()

    def report(self, number: int, **changed) -> Report:
        """Build a report with this number, at a thousand tokens for each; `changed` replaces."""
        plausible = Reports.model_validate_json(GOLDEN.read_text()).reports[0]
        point = MeasuredLoss(kind="train", tokens=number * 1000, loss=5.0 - number / 10)
        fields = {
            "seq": number,
            "at": time.time(),
            "tokens": number * 500,
            "ledger_tokens": number * 1000,
            "rate": 250.0,
            "points": [point],
            "checkpoint": None,
            "anchor": None,
            "activity": Activity.TRAINING,
        }
        return plausible.model_copy(update={**fields, **changed})
