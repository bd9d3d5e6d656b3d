"""A whole site in its own processes, with helpers for a browser and for real workers."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from example_hardware import save_example_measurement
from helpers.browser.navigation import click_and_load
from helpers.paths import TESTS
from helpers.site import migrated_database
from helpers.site.management import manage
from helpers.site.second_factor import AuthenticatorApp
from playwright.sync_api import Page

from coordinator.demo.commands import beat_command, web_command, worker_command
from coordinator.demo.processes import ChildCommand
from coordinator.demo.supervisor import Supervisor
from coordinator.lib.free_ports import ReservedPort
from coordinator.lib.task_queues import TASK_QUEUE, WEBHOOK_QUEUE

DATABASE = "barnraise_live"
CREATE_EXAMPLES = f"""
import sys
sys.path.append({str(TESTS)!r})
from helpers.site import page_fixtures
print(page_fixtures.create_examples())
"""
CODE = re.compile(r"^\s*([A-Z0-9]{3,}-[A-Z0-9]{3,})\s*$", re.M)  # in an email
# Each program that the site starts has a session of its own, and Linux shares the processor's time
# among sessions: a nice worker alone would take as much of it as all tests together.
AS_NICE_SESSION = (
    *("sh", "-c", '(echo 10 > /proc/self/autogroup) 2> /dev/null; exec nice -n 10 "$@"'),
    "nice session",
)
EMAIL, PASSWORD = "organiser@example.org", "raise-the-frame-7"
CREATE_ORGANISER = f"""
import sys
sys.path.append({str(TESTS)!r})
from django.core.management import call_command
from helpers.site.second_factor import add_authenticator_app
from coordinator.accounts.models import User
call_command("prepare_owner", email={EMAIL!r}, password={PASSWORD!r}, name="Ida", staff=True)
add_authenticator_app(User.objects.get(email={EMAIL!r}))
"""
organisers_app = AuthenticatorApp()


class Site:
    """The site's processes on their own database."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.hardware_file = folder / "hardware.json"
        self.reserved_port = ReservedPort()
        self.port = self.reserved_port.number
        valkey = re.sub(r"/0$", "/1", os.environ["REDIS_URL"])
        assert valkey != os.environ["REDIS_URL"]
        self.example_names: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes = Supervisor(folder / "logs")
        self.environment = {
            "DATABASE_URL": migrated_database.database_url(DATABASE),
            "REDIS_URL": valkey,
            "DJANGO_SETTINGS_MODULE": "coordinator.settings",
            "EMAIL_URL": f"file://{folder}/emails",
            "BARNRAISE_NETWORKS": "127.0.0.0/8",  # so that a webhook may reach this very site
        }

    def open(self) -> None:
        migrated_database.create_database(DATABASE)
        self.manage("shell", "-v", "0", "-c", CREATE_ORGANISER)
        self.start_web()
        self.start_celery()
        save_example_measurement(self.hardware_file)
        wait_until(self.is_answering, "the site", 180)

    def is_answering(self) -> bool:
        assert not self.processes.failure, self.processes.failure
        try:
            return httpx.get(f"{self.url}/api/v1/mirror", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def manage(self, *command: str) -> str:
        """Run a management command and return its output."""
        return manage(self.environment, *command)

    def launch_run(
        self, name: str, tokens: int, *settings: str, quorum: int = 1, preset: str = "gpt-nano"
    ) -> str:
        """Create and launch a run of the organiser, and return its slug.

        Args:
            name: The run's name.
            tokens: Its token budget.
            settings: Fields of its specification, as in "model.layers=2".
            quorum: Training starts once so many machines have joined.
            preset: The preset whose model the settings change.
        """
        options = ["--owner", EMAIL, "--name", name, "--report-every", "1", "--launch"]
        options += ["--tokens", str(tokens), "--quorum", str(quorum), "--preset", preset]
        for setting in settings:
            options += ["--set", setting]
        return self.manage("create_run", *options).splitlines()[-1]

    def create_examples(self) -> dict[str, str]:
        """Create the examples once and return their names."""
        if not self.example_names:
            output = self.manage("shell", "-v", "0", "-c", CREATE_EXAMPLES)
            self.example_names = json.loads(output.splitlines()[-1])
        return self.example_names

    def start_web(self) -> None:
        self.reserved_port.release()
        self._supervise("site", web_command(self.port))

    def start_celery(self) -> None:
        self._supervise("celery", worker_command(TASK_QUEUE, WEBHOOK_QUEUE))
        self._supervise("beat", beat_command())

    def _supervise(self, name: str, command: tuple[str, ...]) -> None:
        self.processes.supervise(name, ChildCommand(command, self.environment))

    def barnraise(self, name: str, *command: str) -> subprocess.Popen:
        """Start the real `barnraise` command on a machine called `name`.

        Training has a priority between that of other tests, which it would slow down, and that of a
        polite worker, which would hardly run while they compute.
        """
        environment = {"OMP_NUM_THREADS": "1", "BARNRAISE_HARDWARE": str(self.hardware_file)}
        program = [sys.executable, "-m", "barnraise", *command]
        if command[0] == "join":
            program = [*AS_NICE_SESSION, *program, "--eager"]
        home = str(self.folder / name)
        return self.processes.start(f"{command[0]}-{name}", *program, "--home", home, **environment)

    def log(self, name: str) -> str:
        return (self.processes.logs / f"{name}.log").read_text(errors="replace")

    def newest_email(self, to: str, about: str = "") -> str:
        """Wait for an email to an address that contains `about`, and return the newest."""

        def newest() -> str:
            files = (self.folder / "emails").glob("*.log")
            oldest_first = sorted(files, key=lambda file: file.stat().st_mtime)
            texts = [file.read_text() for file in oldest_first]
            emails = [text for text in texts if f"To: {to}\n" in text and about in text]
            return emails[-1] if emails else ""

        return wait_until(newest, f"an email to {to}")

    def status(self, name: str) -> dict[str, Any]:
        """Return the status that a machine's worker wrote last, or {}."""
        files = list((self.folder / name / "runs").glob("*/status.json"))
        return json.loads(files[0].read_text()) if files else {}


class Person:
    """A signed-in person without a browser."""

    def __init__(self, site: Site):
        self.site = site
        self.http = httpx.Client(
            base_url=site.url, follow_redirects=True, headers={"Referer": site.url}
        )
        self.http.get("/accounts/login/")
        self.post("/accounts/login/", login=EMAIL, password=PASSWORD)
        page = self.post("/accounts/2fa/authenticate/", code=organisers_app.next_code())
        assert "Ida" in page.text, "the login failed"

    def enrol(self, machine: str) -> None:
        """Enrol a machine, approve it, and confirm that it may sign for runs."""
        login, address = request_enrolment(self.site, machine)
        self.post(urlsplit(address).path, answer="confirm")
        assert login.wait(120) == 0, self.site.log(f"login-{machine}")

    def post(self, path: str, **fields: str) -> httpx.Response:
        """Send a form, and return the page that answers."""
        answer = self.http.post(
            path, data={**fields, "csrfmiddlewaretoken": self.http.cookies["csrftoken"]}
        )
        assert answer.status_code == 200, answer.text[:500]
        return answer


def wait_until(condition: Callable[[], Any], description: str, seconds: float = 600.0) -> Any:
    """Wait until the condition returns a true value, and return it.

    Args:
        condition: Called five times a second.
        description: What the test waits for, for its failure.
        seconds: The longest wait.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{description}: not within {seconds:.0f} seconds"
        time.sleep(0.2)
    return value


def submit_login(page: Page, email: str, password: str) -> None:
    """Send the login form, and wait until its answer has loaded."""
    page.goto("/accounts/login/")
    page.get_by_label("Email").first.fill(email)
    page.get_by_label("Password").first.fill(password)
    click_and_load(page.get_by_role("button", name="Sign in").last)


def log_in(page: Page, email: str = EMAIL, password: str = PASSWORD) -> None:
    """Log in; the organiser unless another person is given."""
    submit_login(page, email, password)
    if email == EMAIL:  # a member of the staff, with a second factor
        page.get_by_label("Code").fill(organisers_app.next_code())
        click_and_load(page.get_by_role("button", name="Sign in").last)
    assert "/accounts/login" not in page.url, "the login failed"
    assert "/accounts/2fa" not in page.url, "the code was refused"


def sign_up(site: Site, page: Page, email: str, name: str) -> None:
    """Sign up and verify the address."""
    page.goto("/accounts/signup/")
    page.get_by_label("Email").fill(email)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_label("Name").fill(name)
    click_and_load(page.get_by_role("button", name="Create account"))
    page.get_by_label("Code").fill(CODE.search(site.newest_email(email))[1])
    click_and_load(page.get_by_role("button", name="Confirm"))
    page.get_by_text(name, exact=True).first.wait_for()


def request_enrolment(site: Site, machine: str) -> tuple[subprocess.Popen, str]:
    """Run `barnraise login` on a machine; return its process and the address that it prints."""
    login = site.barnraise(machine, "login", site.url, "--name", machine)
    address = re.compile(r"http://\S+/enrol/\S+/")
    match = wait_until(
        lambda: address.search(site.log(f"login-{machine}")), "an enrolment to approve"
    )
    return login, match[0]


def enrol(site: Site, page: Page, machine: str) -> None:
    """Enrol a machine, approve it in the browser, and confirm that it may sign for runs."""
    login, address = request_enrolment(site, machine)
    page.goto(address)
    page.get_by_text(machine).first.wait_for()
    both = page.get_by_role("button", name="Approve and confirm")
    if both.count():  # a run of the person waits for its text
        click_and_load(both)
    else:
        click_and_load(page.get_by_role("button", name="Approve"))
        click_and_load(page.get_by_role("link", name=f"Confirm {machine}"))
        click_and_load(page.get_by_role("button", name=f"Confirm {machine}"))
    assert login.wait(120) == 0, site.log(f"login-{machine}")
