"""Starts everything that `make demo` shows, and that the browser tests look at: the site, and workers as volunteers."""

import io
import json
import logging
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.core.management import call_command
from django.utils import timezone

from coordinator.accounts.models import Enrolment, Machine, User
from coordinator.demo.multi_mirror import MirrorCluster
from coordinator.demo.processes import ProcessGroup, free_port
from coordinator.lib import embedded_servers, site_identity
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields

OWNER = "owner@barnraise.local"
STARTING = 60.0  # seconds a part may take to come up
STARTING_MIRRORS = 180.0  # …of several at once


class StackError(Exception):
    """A part of the stack did not start or died; the text says which, and its last words."""


class DemoStack:
    """`folder` holds the volunteers' homes and every log. Use as a context manager: leaving it stops everything.
    `mirrors`: how many sites there are; of several this process's own is the first."""

    def __init__(self, folder: Path, port: int = 8000, mirrors: int = 1):
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self.folder = folder
        self.processes = ProcessGroup(folder / "logs")
        self.cluster = MirrorCluster(folder, mirrors, port) if mirrors > 1 else None
        self.port = self.cluster.first.port if self.cluster else free_port(port)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "DemoStack":
        return self

    def __exit__(self, *exception: object) -> None:
        workers = [name for name in self.processes.children if name.startswith("worker")]
        if workers:
            self.processes.stop(*workers)
        self.processes.stop()
        if self.cluster:
            self.cluster.stop()
        embedded_servers.stop(settings.STATE_DIR)

    # ---- the site --------------------------------------------------------------------------------------------

    def start_site(self) -> None:
        if self.cluster:
            self.cluster.start_setup()
        self.migrate()
        if self.cluster:
            self.cluster.start(self._wait_for_mirrors)
        else:
            self.start_web()
            self.start_celery()

    def migrate(self) -> None:
        call_command("migrate", verbosity=0, interactive=False)

    def start_web(self) -> None:
        serve = (
            "-m",
            "uvicorn",
            "coordinator.asgi:application",
            "--host",
            "127.0.0.1",
            "--port",
            self.port,
        )
        self.processes.start(
            "site",
            sys.executable,
            *map(str, serve),
            "--no-access-log",
            "--timeout-graceful-shutdown",
            "3",
        )

    def start_celery(self) -> None:
        """One process that works and beats: solo, because the tasks are short and a fork costs memory."""
        celery = ("-m", "celery", "-A", "coordinator.celery:app")
        self.processes.start(
            "celery", sys.executable, *celery, "worker", "-P", "solo", "--loglevel", "WARNING"
        )
        self.processes.start(
            "beat", sys.executable, *celery, "beat", "--loglevel", "WARNING", "--pidfile="
        )

    def wait_for_site(self) -> None:
        self.wait(self._site_answers, f"the site at {self.url}")

    def _site_answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/api/v1/mirror", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    # ---- people and runs -------------------------------------------------------------------------------------

    def create_owner(self) -> tuple[User, str]:
        """The demo's owner and the password to log in with, made once and kept in the state folder."""
        path = settings.STATE_DIR / "demo_password"
        password = path.read_text() if path.exists() else f"barn-{secrets.token_hex(4)}"
        path.touch(mode=0o600)
        path.write_text(password)
        call_command(
            "prepare_owner", email=OWNER, password=password, name="Demo owner", stdout=io.StringIO()
        )
        return User.objects.get(email=OWNER), password

    def launch_run(self, owner: User, name: str, **fields: Any) -> Run:
        spec = spec_from_fields({key.replace("__", "."): value for key, value in fields.items()})
        run = Run.create(owner, name, spec, report_every=1.0)
        run.launch()
        return run

    # ---- volunteers ------------------------------------------------------------------------------------------

    def worker_dir(self, number: int) -> Path:
        return self.folder / f"worker-{number}"

    def enrol(self, owner: User, numbers: list[int]) -> None:
        """`barnraise login` on each machine the site does not know yet; the owner approves each code."""
        logins = {n: self._start_login(n) for n in numbers if not self._enrolled(n)}
        pending = set(logins)

        def approved() -> bool:
            waiting = Enrolment.objects.filter(
                decision=Enrolment.Decision.PENDING, expires__gt=timezone.now()
            )
            for enrolment in waiting:  # and not those that a demo which was killed left behind
                enrolment.approve(owner)
            for number in list(pending):
                if logins[number].poll() == 0:
                    pending.discard(number)
                    self.processes.children.pop(f"login-{number}")
            return not pending

        self.wait(approved, "a machine's enrolment")

    def _start_login(self, number: int):
        command = (
            "-m",
            "barnraise",
            "login",
            self.url,
            "--name",
            f"volunteer-{number}",
            "--home",
            self.worker_dir(number),
        )
        return self.processes.start(f"login-{number}", sys.executable, *map(str, command))

    def _enrolled(self, number: int) -> bool:
        try:
            known = json.loads((self.worker_dir(number) / "coordinator.json").read_text())
        except FileNotFoundError:
            return False
        ours = known["url"] == self.url and known["mirror"]["key"] == site_identity.identity().key
        return ours and Machine.objects.filter(pk=known["machine"], revoked=None).exists()

    @property
    def _alike(self) -> dict[str, str]:
        """The workers share one machine, and one measurement of it."""
        return {"OMP_NUM_THREADS": "1", "BARNRAISE_HARDWARE": str(self.folder / "hardware.json")}

    def start_measurement(self) -> None:
        """Begins to measure this machine, if that was never done: while the site comes up, and before workers share
        it."""
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
            self.processes.start("measure", sys.executable, *map(str, command), **self._alike)

    def wait_for_measurement(self) -> None:
        if "measure" in self.processes.children:
            self.wait(
                lambda: self.processes.children["measure"].poll() == 0,
                "the measurement of this machine",
            )
            self.processes.children.pop("measure")

    def start_worker(self, number: int, run: Run) -> None:
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
        # OpenMP would start a thread a core in each of three workers; spinning, they take turns at slowing each other.
        self.processes.start(f"worker-{number}", sys.executable, *map(str, command), **self._alike)

    def start_workers(self, numbers: list[int], run: Run) -> None:
        """Of several mirrors each would have one of them prepare the text, and two might launch the run: there the
        first comes alone."""
        if self.cluster:
            self.start_worker(numbers.pop(0), run)
            self.wait(
                lambda: Run.objects.filter(pk=run.pk).exclude(spec_text="").exists(),
                "the run's launch",
            )
            self.cluster.wait_until_in_sync()
        for number in numbers:
            self.start_worker(number, run)

    def read_status(self, number: int, run: Run) -> dict[str, Any] | None:
        """What a worker last wrote of itself, None before its first word."""
        try:
            return json.loads(
                (self.worker_dir(number) / "runs" / str(run.pk) / "status.json").read_text()
            )
        except FileNotFoundError:
            return None

    # ---- waiting ---------------------------------------------------------------------------------------------

    def _wait_for_mirrors(self, done: Callable[[], object], what: str) -> None:
        def all_well() -> object:
            if fallen := self.cluster and self.cluster.failed_process():
                mirror, name = fallen
                raise StackError(f"{mirror.name} did not come up; the last words of its {name}, of {mirror.processes.logs}:\n"
                             f"{mirror.processes.log_tail(name)}")  # fmt: skip
            return done()

        self.wait(all_well, what, STARTING_MIRRORS)

    def check_processes(self) -> None:
        """Raises StackError when a process has died."""
        if name := self.processes.failed_process():
            raise StackError(
                f"{name} died; its last words, of {self.processes.logs / (name + '.log')}:\n{self.processes.log_tail(name)}"
            )

    def wait(self, done, what: str, seconds: float = STARTING) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            self.check_processes()
            if time.monotonic() > deadline:
                raise StackError(
                    f"{what} did not come up in {seconds:.0f} seconds; logs are in {self.processes.logs}"
                )
            time.sleep(0.1)
