"""Start what `make demo` shows and the browser tests use: the site, and workers as volunteers."""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.core.management import call_command
from django.utils import timezone

from coordinator.accounts.models import Enrolment, Machine, User
from coordinator.demo.email_printer import EmailPrinter
from coordinator.demo.multi_mirror import MirrorCluster
from coordinator.demo.supervised_site import SupervisedSite
from coordinator.lib import site_identity
from coordinator.lib.embedded import embedded_servers
from coordinator.lib.free_ports import free_port
from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields

START_SECONDS = 60.0  # for a part to start
LAUNCH_SECONDS = 240.0  # for a machine to prepare the text, on a busy computer
MACHINE_NAMES = ("workshop", "attic", "cellar")
MIRRORS_START_SECONDS = 180.0  # for several mirrors to start


class StackError(Exception):
    """A part of the stack did not start or died; the text says which, with the end of its log."""


class DemoStack:
    """Run a whole platform. Use it as a context manager: leaving it stops everything.

    Args:
        folder: Holds the workers' state folders and every log.
        port: First port.
        mirrors: Number of sites; the first one is this process's own.
    """

    def __init__(self, folder: Path, port: int = 8000, mirrors: int = 1) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self.folder = folder
        self.cluster = MirrorCluster(folder, mirrors, port) if mirrors > 1 else None
        self.port = self.cluster.first.port if self.cluster else free_port(port)
        self.url = f"http://127.0.0.1:{self.port}"
        # The links in emails and notifications.
        self.emails = EmailPrinter(folder / "emails")
        environment = {"BARNRAISE_URL": self.url, **self.email_settings}
        if self.cluster:
            for mirror in self.cluster.all:
                mirror.environment |= self.email_settings
        self.site = SupervisedSite(settings.STATE_DIR, folder / "logs", self.port, environment)
        self.processes = self.site.supervisor

    def __enter__(self) -> "DemoStack":
        return self

    def __exit__(self, *exception: object) -> None:
        workers = [name for name in self.processes.children if name.startswith("worker")]
        if workers:
            self.processes.stop(*workers)
        if self.cluster:
            self.cluster.stop()
        self.site.stop()
        embedded_servers.stop(settings.STATE_DIR)

    @property
    def email_settings(self) -> dict[str, str]:
        """The variables with which a site writes its emails to a folder."""
        return {"EMAIL_URL": f"file://{self.emails.folder}"}

    # ---- the site --------------------------------------------------------------------------------

    def start_site(self) -> None:
        """Start the site, or all mirrors."""
        try:
            self.site.start_servers()
            if self.cluster:
                self.cluster.start_setup()
        except RuntimeError as error:
            raise StackError(str(error)) from error
        self.processes.count_restarts_in(settings.REDIS_URL)
        if self.cluster:
            self.migrate()
            self.cluster.start(self._wait_for_mirrors)
        else:
            self.site.start_web()  # it loads while the tables are created
            self.migrate()
            self.site.start_celery()

    def migrate(self) -> None:
        """Create the tables."""
        call_command("migrate", verbosity=0, interactive=False)

    def wait_for_site(self) -> None:
        """Wait until the site answers."""
        self.wait(self._site_answers, f"the site at {self.url}")

    def _site_answers(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/api/v1/mirror", timeout=2, trust_env=False)
            return answer.status_code == 200
        except httpx.HTTPError:
            return False

    # ---- people and runs -------------------------------------------------------------------------

    def launch_run(self, owner: User, name: str, **fields: Any) -> Run:
        """Create and launch a run."""
        spec = spec_from_fields({key.replace("__", "."): value for key, value in fields.items()})
        run = Run.create(owner, NewRun(name, spec, report_every=1.0))
        run.launch()
        return run

    # ---- volunteers ------------------------------------------------------------------------------

    def worker_dir(self, number: int) -> Path:
        """Return a worker's state folder."""
        return self.folder / f"worker-{number}"

    def enrol(self, owners: Mapping[int, User]) -> None:
        """Run `barnraise login` on machines that are not enrolled.

        Each person approves the code of their machine, and confirms that it may sign for their
        runs.

        Args:
            owners: the number of each machine and its owner.
        """
        logins = {
            n: self._start_login(n) for n, who in owners.items() if not self._enrol_worker(n, who)
        }
        people = {self.machine_name(number): owner for number, owner in owners.items()}
        pending = set(logins)

        def approved() -> bool:
            waiting = Enrolment.objects.filter(
                decision=Enrolment.Decision.PENDING, expires__gt=timezone.now()
            )
            for enrolment in waiting:
                if (owner := people.get(enrolment.description["hostname"])) is not None:
                    enrolment.approve(owner).confirm(actor=owner)
            for number in list(pending):
                if logins[number].poll() == 0:
                    pending.discard(number)
                    self.processes.children.pop(f"login-{number}")
            return not pending

        self.wait(approved, "a machine's enrolment")

    @staticmethod
    def machine_name(number: int) -> str:
        """Return what a machine is called."""
        return MACHINE_NAMES[number - 1]

    def _start_login(self, number: int) -> subprocess.Popen:
        command = (
            "-m",
            "barnraise",
            "login",
            self.url,
            "--name",
            self.machine_name(number),
            "--home",
            self.worker_dir(number),
        )
        return self.processes.start(f"login-{number}", sys.executable, *map(str, command))

    def _enrol_worker(self, number: int, owner: User) -> bool:
        try:
            membership = json.loads((self.worker_dir(number) / "coordinator.json").read_text())
        except FileNotFoundError:
            return False
        ours = (
            membership["url"] == self.url
            and membership["mirror"]["key"] == site_identity.identity().key
        )
        machines = Machine.objects.filter(pk=membership["machine"], owner=owner, revoked=None)
        return ours and machines.exists()

    @property
    def _shared_machine(self) -> dict[str, str]:
        """Return variables for workers that share one machine and one measurement of it."""
        return {"OMP_NUM_THREADS": "1", "BARNRAISE_HARDWARE": str(self.folder / "hardware.json")}

    def start_measurement(self) -> None:
        """Start measuring this machine, if that was never done, before workers share it."""
        if not (self.folder / "hardware.json").exists():
            command = (
                "-m",
                "barnraise",
                "plan",
                "--model",
                "gpt-nano",
                "--threads",
                "1",
                "--home",
                self.folder,
            )
            self.processes.start(
                "measure", sys.executable, *map(str, command), **self._shared_machine
            )

    @property
    def is_measuring(self) -> bool:
        """Whether this machine is being measured."""
        return "measure" in self.processes.children

    def wait_for_measurement(self) -> None:
        """Wait until the machine is measured."""
        if "measure" in self.processes.children:
            self.wait(
                lambda: self.processes.children["measure"].poll() == 0,
                "the measurement of this machine",
            )
            self.processes.children.pop("measure")

    def start_worker(self, number: int, run: Run) -> None:
        """Start a worker that joins the run."""
        command = (
            "-m",
            "barnraise",
            "join",
            run.slug,
            "--home",
            self.worker_dir(number),
            "--threads",
            1,
        )
        # OpenMP would start a thread for each core in each worker, and they would slow each other.
        self.processes.start(
            f"worker-{number}", sys.executable, *map(str, command), **self._shared_machine
        )

    def start_workers(self, numbers: list[int], run: Run) -> None:
        """Start the owner's worker, which prepares the text, and after the launch the others.

        Before the launch other people's machines do not see the run.
        """
        self.start_worker(numbers[0], run)
        self.wait(
            lambda: Run.objects.filter(pk=run.pk).exclude(spec_text="").exists(),
            "the run's launch",
            LAUNCH_SECONDS,
        )
        if self.cluster:
            self.cluster.wait_until_in_sync()
        for number in numbers[1:]:
            self.start_worker(number, run)

    def read_status(self, number: int, run: Run) -> dict[str, Any] | None:
        """Return what a worker last wrote about itself; None before the first time."""
        try:
            return json.loads(
                (self.worker_dir(number) / "runs" / str(run.pk) / "status.json").read_text()
            )
        except FileNotFoundError:
            return None

    # ---- waiting ---------------------------------------------------------------------------------

    def _wait_for_mirrors(self, done: Callable[[], object], what: str) -> None:
        def check_then_test() -> object:
            if fallen := self.cluster and self.cluster.failed_process():
                mirror, name = fallen
                raise StackError(
                    f"{mirror.name} did not start; the end of its log {name}, in "
                    f"{mirror.processes.logs}:\n"
                    f"{mirror.processes.log_tail(name)}"
                )
            return done()

        self.wait(check_then_test, what, MIRRORS_START_SECONDS)

    def check_processes(self) -> None:
        """Raise StackError if a process has died and is not started again."""
        if self.processes.failure:
            raise StackError(self.processes.failure)
        if name := self.processes.failed_process():
            raise StackError(
                f"{name} died; the end of its log {self.processes.logs / (name + '.log')}:\n"
                f"{self.processes.log_tail(name)}"
            )

    def wait(self, done: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
        """Wait for a condition; raise StackError after `seconds` or if a process dies."""
        deadline = time.monotonic() + seconds
        while not done():
            self.check_processes()
            if time.monotonic() > deadline:
                raise StackError(
                    f"{what} did not start in {seconds:.0f} seconds; logs are in "
                    f"{self.processes.logs}"
                )
            time.sleep(0.1)
