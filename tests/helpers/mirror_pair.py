"""Two real mirrors: servers, databases and keys of their own, and nothing between them but HTTP."""

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
from helpers.paths import ROOT

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.protocol.coordinator_messages import Reports
from barnraise.protocol.enums import Activity
from barnraise.protocol.reports import MeasuredLoss, Report
from barnraise.protocol.signing import Identity
from coordinator.demo.processes import ProcessGroup, free_port

GOLDEN = ROOT / "tests" / "contract" / "golden" / "reports.json"
PASSWORD = "raise-the-frame-7"
WORK = """
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
    """One mirror. `manage` runs a command there; `start` and `kill` its web server."""

    def __init__(self, name: str, folder: Path, valkey: int):
        self.name = name
        self.port = free_port(31_000 + secrets.randbelow(9_000))  # other processes run tests too
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / name).mkdir()
        self.processes = ProcessGroup(folder / name / "logs")
        self.environment = {
            "DATABASE_URL": re.sub(
                r"/barnraise(?=\?|$)", f"/mirror_{name}", os.environ["DATABASE_URL"]
            ),
            "REDIS_URL": re.sub(r"/0$", f"/{valkey}", os.environ["REDIS_URL"]),
            "BARNRAISE_STATE": str(folder / name),
            "BARNRAISE_NAME": f"Mirror {name}",
        }

    def manage(self, *command: str, fails: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, ROOT / "manage.py", *command], env={**os.environ, **self.environment},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + (done.stderr if fails else "")

    def shell(self, code: str) -> str:
        return self.manage("shell", "-v", "0", "-c", code).strip().splitlines()[-1]

    def start(self) -> None:
        serve = (
            "-m",
            "uvicorn",
            "coordinator.asgi:application",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        )
        self.processes.start("site", sys.executable, *serve, "--no-access-log", **self.environment)
        end = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{self.url}/api/v1/mirror", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                assert time.monotonic() < end, self.processes.log_tail("site")
            time.sleep(0.2)

    def kill(self) -> None:
        site = self.processes.children.pop("site")
        site.kill()
        site.wait()

    def snapshot(self, run: str) -> dict:
        answer = httpx.get(f"{self.url}/live/{run}/", timeout=30)
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()

    def start_tasks(self) -> None:
        """What Celery would do every second or two, until the end."""
        manage = (str(ROOT / "manage.py"), "shell", "-v", "0", "-c", WORK)
        self.processes.start("tasks", sys.executable, *manage, **self.environment)


@contextmanager
def two_mirrors(folder: Path) -> Iterator[list[MirrorProcess]]:
    """Each with its tables; Postgres and Valkey run (see conftest.state)."""
    made = [MirrorProcess("a", folder, 2), MirrorProcess("b", folder, 3)]
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        try:
            connection.execute("CREATE DATABASE mirror_a")
            made[0].manage("migrate", "--verbosity", "0")
            connection.execute("CREATE DATABASE mirror_b TEMPLATE mirror_a")
            yield made
        finally:
            for site in made:
                site.processes.stop()
                connection.execute(f"DROP DATABASE IF EXISTS mirror_{site.name} WITH (FORCE)")


def publish_list(a: MirrorProcess, b: MirrorProcess, folder: Path) -> str:
    """A mirror list of the two, published at the first. Its digest."""
    file, root = str(folder / "list.json"), str(folder / "root")
    key = a.manage("mirror_list", "keygen", root).strip()
    a.manage(
        "mirror_list",
        "begin",
        "--url",
        a.url,
        "--name",
        "A",
        "--root",
        key,
        "--threshold",
        "1",
        "--to",
        file,
    )
    theirs = b.shell(
        "from coordinator.lib import site_identity; print(site_identity.identity().key)"
    )
    a.manage("mirror_list", "add", "--key", theirs, "--url", b.url, "--name", "B", "--to", file)
    a.manage("mirror_list", "sign", file, "--key", root)
    a.manage("mirror_list", "publish", file, "--first")
    return re.search(r"BLAKE3 (\w{64})", a.manage("mirror_list", "show"))[1]


SOMEBODYS = """
import json, sys
sys.path.append({tests!r})
from helpers import page_fixtures
from helpers.page_fixtures import create_launched_run, create_machine
from coordinator.accounts.models import User
from coordinator.fleet.join import admit_machine
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.runs import models
from coordinator.runs.spec_form import spec_from_fields
from barnraise.protocol.coordinator_messages import JoinRequest
ida = User.objects.get(name="Ida")
barn, signer = create_machine(ida, "barn", 1)
create_machine(ida, "loft", 2)
page_fixtures.EVERY = 1.0
run = create_launched_run(ida, "Two roofs", signer, **{{"recipe.token_budget": "100000"}})
admit_machine(run, barn, JoinRequest(version="0.1", addresses=["192.0.2.7:41000"]))
run.refresh_from_db()
advance_run(run)
draft = models.Run.create(ida, "A draft", spec_from_fields({{}}))
print(json.dumps({{"run": str(run.pk), "draft": draft.slug}}))
"""


def create_run(site: MirrorProcess) -> dict[str, str]:
    """Ida's two machines, a run of hers in training, and a draft: {"run": its id, "draft": its slug}."""
    site.manage(
        "prepare_owner", "--email", "ida@example.org", "--password", PASSWORD, "--name", "Ida"
    )
    return json.loads(site.shell(SOMEBODYS.format(tests=str(ROOT / "tests"))))


class ReportingMachine:
    """One of Ida's, by the number of its key; tells whichever site it is told to."""

    def __init__(self, seed: int):
        self.identity = Identity(bytes([seed]) * 32)

    def send_reports(self, site: MirrorProcess, run: str, *numbers: int, **said) -> None:
        """Its reports of these numbers, each a thousand tokens further."""
        client = CoordinatorClient(site.url, self.identity)
        client.pin_mirror()
        if not said.pop("joined", False):
            client.join_run(run, ["192.0.2.7:41000"])
        client.send_reports(run, [self.report(number, **said) for number in numbers])
        client.close()

    def report(self, number: int, **said) -> Report:
        plausible = Reports.model_validate_json(GOLDEN.read_text()).reports[0]
        point = MeasuredLoss(kind="train", tokens=number * 1000, loss=5.0 - number / 10)
        told = {
            "seq": number, "at": time.time(), "tokens": number * 500, "ledger_tokens": number * 1000, "rate": 250.0,
            "points": [point], "checkpoint": None, "anchor": None, "activity": Activity.TRAINING,
        }  # fmt: skip
        return plausible.model_copy(update={**told, **said})
