"""A whole site in its own processes, with helpers for a browser and for real workers."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
from helpers.navigation import click_and_load
from helpers.paths import ROOT
from playwright.sync_api import Page

from coordinator.demo.processes import ProcessGroup, free_port

MEASURED = ROOT / "build" / "hardware.json"
DATABASE = "barnraise_live"
CODE = re.compile(r"^\s*([A-Z0-9]{3,}-[A-Z0-9]{3,})\s*$", re.M)  # in an email
EMAIL, PASSWORD = "organiser@example.org", "raise-the-frame-7"


class Site:
    """The site's processes on their own database."""

    def __init__(self, folder: Path):
        self.folder, self.port = (
            folder,
            free_port(random.randrange(20_000, 30_000)),
        )  # other test runs may use the machine too
        database = re.sub(r"/barnraise(?=\?|$)", f"/{DATABASE}", os.environ["DATABASE_URL"])
        valkey = re.sub(r"/0$", "/1", os.environ["REDIS_URL"])
        assert database != os.environ["DATABASE_URL"] and valkey != os.environ["REDIS_URL"]
        self.furnished: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{self.port}"
        self.family = ProcessGroup(folder / "logs")
        self.environment = {
            "DATABASE_URL": database,
            "REDIS_URL": valkey,
            "DJANGO_SETTINGS_MODULE": "coordinator.settings",
            "EMAIL_URL": f"file://{folder}/emails",
            "BARNRAISE_NETWORKS": "127.0.0.0/8",  # so that a webhook may reach this very site
        }

    def open(self) -> None:
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE}")
        self.manage("migrate", "--verbosity", "0")
        self.manage(
            "prepare_owner", "--email", EMAIL, "--password", PASSWORD, "--name", "Ida", "--staff"
        )
        self.start_web()
        self.start_celery()
        measured = self.barnraise(
            "anybody", "plan", "--model", "gpt-nano", "--threads", "1"
        )  # before workers share it
        assert measured.wait(400) == 0, self.log("plan-anybody")
        wait_until(self.is_answering, "the site", 180)

    def is_answering(self) -> bool:
        assert self.family.children["site"].poll() is None, self.log("site")
        try:
            return httpx.get(f"{self.url}/api/v1/mirror", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def manage(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, ROOT / "manage.py", *command], env={**os.environ, **self.environment},
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def furnish(self) -> dict[str, str]:
        """Create the examples once and return their names."""
        if not self.furnished:
            there = f"import sys; sys.path.append({str(ROOT / 'tests')!r}); from helpers import page_fixtures; print(page_fixtures.create_examples())"
            self.furnished = json.loads(
                self.manage("shell", "-v", "0", "-c", there).splitlines()[-1]
            )
        return self.furnished

    def start_web(self) -> None:
        serve = (
            "-m",
            "uvicorn",
            "coordinator.asgi:application",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        )
        self.family.start("site", sys.executable, *serve, "--no-access-log", **self.environment)

    def start_celery(self) -> None:
        celery = (sys.executable, "-m", "celery", "-A", "coordinator.celery:app")
        self.family.start(
            "celery", *celery, "worker", "-P", "solo", "--loglevel", "WARNING", **self.environment
        )
        self.family.start(
            "beat", *celery, "beat", "--loglevel", "WARNING", "--pidfile=", **self.environment
        )

    def barnraise(self, name: str, *command: str) -> subprocess.Popen:
        """Start the real `barnraise` command on a machine called `name`."""
        home = str(self.folder / name)
        alike = {
            "OMP_NUM_THREADS": "1",
            "BARNRAISE_HARDWARE": str(MEASURED),
        }  # one machine, measured once
        return self.family.start(
            f"{command[0]}-{name}",
            sys.executable,
            "-m",
            "barnraise",
            *command,
            "--home",
            home,
            **alike,
        )

    def log(self, name: str) -> str:
        return (self.family.logs / f"{name}.log").read_text(errors="replace")

    def newest_email(self, to: str, about: str = "") -> str:
        """Wait for an email to an address that contains `about`, and return the newest."""

        def newest() -> str:
            found = sorted(
                (self.folder / "emails").glob("*.log"), key=lambda file: file.stat().st_mtime
            )
            emails = [
                text
                for file in found
                if f"To: {to}\n" in (text := file.read_text()) and about in text
            ]
            return emails[-1] if emails else ""

        return wait_until(newest, f"an email to {to}")

    def status(self, name: str) -> dict[str, Any]:
        found = list((self.folder / name / "runs").glob("*/status.json"))
        return json.loads(found[0].read_text()) if found else {}


class Person:
    """A signed-in person without a browser."""

    def __init__(self, site: Site):
        self.http = httpx.Client(
            base_url=site.url, follow_redirects=True, headers={"Referer": site.url}
        )
        self.http.get("/accounts/login/")
        page = self.post("/accounts/login/", login=EMAIL, password=PASSWORD)
        assert "Ida" in page.text, "the login failed"

    def post(self, path: str, **fields: str) -> httpx.Response:
        answer = self.http.post(
            path, data={**fields, "csrfmiddlewaretoken": self.http.cookies["csrftoken"]}
        )
        assert answer.status_code == 200, answer.text[:500]
        return answer


def wait_until(happened: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := happened()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} seconds"
        time.sleep(0.2)
    return value


def log_in(page: Page) -> None:
    page.goto("/accounts/login/")
    page.get_by_label("Email").first.fill(EMAIL)
    page.get_by_label("Password").first.fill(PASSWORD)
    page.get_by_role("button", name=re.compile("log in|sign in", re.I)).last.click()
    page.wait_for_url(lambda url: "/accounts/login" not in url)


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
    login, where = (
        site.barnraise(machine, "login", site.url, "--name", machine),
        re.compile(r"http://\S+/enrol/\S+/"),
    )
    return login, wait_until(
        lambda: where.search(site.log(f"login-{machine}")), "a code to approve"
    )[0]


def enrol(site: Site, page: Page, machine: str) -> None:
    login, where = request_enrolment(site, machine)
    page.goto(where)
    page.get_by_text(machine).first.wait_for()
    click_and_load(page.get_by_role("button", name="Approve"))
    assert login.wait(120) == 0, site.log(f"login-{machine}")
