"""Check a site from its own machine: what works, what does not, and what to do about it.

Each check returns findings and never raises: the one part that is broken must not hide the others.
"""

import shutil
import smtplib
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httpx
import redis.exceptions
import websockets.exceptions
from django.conf import settings
from django.core.mail import get_connection
from django.db import DatabaseError, connection
from websockets.sync.client import connect

from barnraise import __version__
from barnraise.errors import StateError
from barnraise.formats import format_bytes
from barnraise.protocol.clock import estimate_offset
from barnraise.protocol.http_client import open_http_client
from coordinator.eventlog import writer
from coordinator.eventlog.database_owner import describe_refusal
from coordinator.lib import heartbeats
from coordinator.lib.backup_record import read_last_backup
from coordinator.lib.schema_comparison import describe_schema_problem
from coordinator.lib.trusted_proxies import CLIENT_HEADER, UNKNOWN_CLIENT
from coordinator.lib.valkey import valkey_client
from coordinator.web.worker_wheel import find_wheel

MIN_POSTGRES = 14
MAX_CLOCK_SECONDS = 2.0
MIN_FREE_SHARE = 0.1
MIN_FREE_BYTES = 2 << 30
HTTP_SECONDS = 10.0
NO_RUN = "00000000-0000-0000-0000-000000000000"


class Health(StrEnum):
    """How a part is."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    part: str  # what was checked
    verdict: Health
    sentence: str  # what was found and, if something is wrong, what to do


Check = Callable[[], Iterator[Finding]]


def examine_site() -> Iterator[Finding]:
    """Run all checks."""
    checks: list[Check] = [
        check_database,
        check_valkey,
        check_background,
        check_mail,
        check_address,
        check_websockets,
        check_clock,
        check_disk,
        check_files,
        check_backups,
    ]
    for check in checks:
        yield from check()


def check_database() -> Iterator[Finding]:
    """Check that Postgres answers, is new enough, and has all tables."""
    try:
        problem = describe_schema_problem() or describe_refusal()
        version: int = connection.pg_version // 10_000
    except DatabaseError as error:
        yield _report_failure("database", f"Postgres does not answer: {_first_line(error)}.")
        return
    if version < MIN_POSTGRES:
        yield _report_failure(
            "database", f"Postgres {version} is too old: use {MIN_POSTGRES} or newer."
        )
    elif problem:
        yield _report_failure("database", f"{problem.removesuffix('.')}.")
    else:
        yield _report_ok("database", f"Postgres {version}, with the tables of this version.")


def check_valkey() -> Iterator[Finding]:
    """Check that Valkey answers and loses nothing of the queue of reports."""
    try:
        client: Any = valkey_client()
        client.ping()
        policy = client.config_get("maxmemory-policy").get("maxmemory-policy", "")
        appends = client.config_get("appendonly").get("appendonly", "")
    except redis.exceptions.ResponseError:
        yield _report_ok("live store", "Valkey answers; its configuration cannot be read.")
        return
    except redis.exceptions.RedisError as error:
        yield _report_failure("live store", f"Valkey does not answer: {_first_line(error)}.")
        return
    if policy != "noeviction":
        yield _report_failure(
            "live store", f"maxmemory-policy is {policy}: set noeviction, or reports are lost."
        )
    elif appends != "yes":
        yield _report_warning(
            "live store", "appendonly is off: a restart of Valkey loses queued reports."
        )
    else:
        yield _report_ok("live store", "Valkey answers and stores its queue on disk.")


def check_background() -> Iterator[Finding]:
    """Check that beat and Celery advance."""
    sentences = {
        heartbeats.Part.SCHEDULE: ("beat", "start barnraise-beat, exactly once"),
        heartbeats.Part.REPORTS: ("Celery, reports", "start barnraise-celery"),
        heartbeats.Part.EVENTS: ("Celery, events", "start barnraise-celery"),
    }
    try:
        heartbeats.read_ages()
        time.sleep(min(heartbeats.INTERVALS.values()))  # a part counts from the first look at it
        _wait_for_first_heartbeats()
        ages = heartbeats.read_ages()
    except redis.exceptions.RedisError:
        yield _report_failure("Celery and beat", "Not known: Valkey does not answer.")
        return
    recorded: Any = valkey_client().hkeys(heartbeats.KEY)
    for part, (name, advice) in sentences.items():
        if part.value not in recorded:
            yield _report_failure(name, f"It has never advanced: {advice}.")
        elif ages[part] > heartbeats.STOPPED_SECONDS:
            yield _report_failure(name, f"It last advanced {ages[part]:.0f} s ago: {advice}.")
        else:
            yield _report_ok(name, f"It advanced {ages[part]:.0f} s ago.")


def _wait_for_first_heartbeats() -> None:
    """Wait until each part has advanced, as long as the slowest needs after the site's start."""
    deadline = time.monotonic() + max(heartbeats.INTERVALS.values())
    while time.monotonic() < deadline:
        recorded: Any = valkey_client().hlen(heartbeats.KEY)
        if recorded >= len(heartbeats.Part):
            return
        time.sleep(0.2)


def check_mail() -> Iterator[Finding]:
    """Check that the mail server accepts this site's log-in; no email is sent."""
    backend = settings.EMAIL_BACKEND.rsplit(".", 2)[-2]
    if backend == "console":
        yield _report_warning("mail", "Emails are only written to Celery's log: set EMAIL_URL.")
        return
    if backend != "smtp":
        yield _report_warning("mail", f"Emails go to the backend {backend}, not to a mail server.")
        return
    try:
        mail: Any = get_connection()
        mail.open()
        mail.close()
    except (OSError, smtplib.SMTPException, ssl.SSLError) as error:
        yield _report_failure("mail", f"{settings.EMAIL_HOST} refuses: {_first_line(error)}.")
        return
    yield _report_ok(
        "mail", f"{settings.EMAIL_HOST} accepts the log-in. Send a test letter as well."
    )


def check_address() -> Iterator[Finding]:
    """Check that the site answers at its public address, with the headers of the proxy."""
    url = settings.SITE_URL
    try:
        with (
            open_http_client(timeout=HTTP_SECONDS) as client,
            client.stream("GET", f"{url}/api/v1/mirror") as answer,
        ):
            pass  # the status and the headers say all
    except (StateError, httpx.HTTPError) as error:
        yield _report_failure("address", f"{url} does not answer: {_first_line(error)}.")
        return
    if answer.is_redirect and settings.HTTPS:
        yield _report_failure(
            "address",
            f"{url} redirects to itself: the proxy must send X-Forwarded-Proto, and "
            "BARNRAISE_PROXIES must name the proxy's address.",
        )
    elif answer.status_code != 200:
        yield _report_failure(
            "address",
            f"{url} answers {answer.status_code}: BARNRAISE_HOSTS must name "
            f"{urlsplit(url).hostname}.",
        )
    elif CLIENT_HEADER in answer.headers:
        yield _report_failure("address", UNKNOWN_CLIENT)
    elif settings.HTTPS and "strict-transport-security" not in answer.headers:
        yield _report_warning("address", f"{url} answers without Strict-Transport-Security.")
    elif not settings.HTTPS:
        yield _report_warning(
            "address", f"{url} answers without TLS: set BARNRAISE_HTTPS behind a proxy."
        )
    else:
        yield _report_ok("address", f"{url} answers with TLS and its header.")


def check_websockets() -> Iterator[Finding]:
    """Check that the proxy passes websockets: a run that does not exist is refused by the site."""
    url = settings.SITE_URL
    socket = f"{url.replace('http', 'ws', 1)}/ws/runs/{NO_RUN}/"
    try:
        with connect(socket, origin=url, open_timeout=HTTP_SECONDS, proxy=None):
            pass
    except websockets.exceptions.InvalidStatus as error:
        if error.response.status_code != 403:
            yield _report_failure(
                "websockets",
                f"{socket} answers {error.response.status_code}: the proxy must pass Upgrade and "
                "Connection.",
            )
            return
    except (OSError, websockets.exceptions.WebSocketException, TimeoutError) as error:
        yield _report_failure("websockets", f"{socket} cannot be opened: {_first_line(error)}.")
        return
    yield _report_ok("websockets", "The site answers websockets at its public address.")


def check_clock() -> Iterator[Finding]:
    """Compare this machine's clock with Postgres's and with the other mirrors'."""
    try:
        with connection.cursor() as cursor:
            asked = time.monotonic()
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            row: Any = cursor.fetchone()
            shown = estimate_offset(row[0], time.time(), time.monotonic() - asked)
            offset = 0.0 if shown is None else -shown
            ahead = writer.clock_offset()
    except (DatabaseError, redis.exceptions.RedisError):
        yield _report_warning("clock", "Not known: a server does not answer.")
        return
    if abs(offset) > MAX_CLOCK_SECONDS:
        yield _report_failure(
            "clock", f"It is {offset:+.0f} s off Postgres's: synchronise both by NTP."
        )
    elif abs(ahead) > MAX_CLOCK_SECONDS:
        yield _report_failure(
            "clock", f"It is {ahead:+.0f} s ahead of the other mirrors': use NTP."
        )
    else:
        yield _report_ok("clock", "It agrees with Postgres's and with the other mirrors'.")


def check_disk() -> Iterator[Finding]:
    """Check the space where the state folder lies."""
    usage = shutil.disk_usage(settings.STATE_DIR)
    free = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free"
    if usage.free < MIN_FREE_BYTES:
        yield _report_failure("disk", f"Only {free} in {settings.STATE_DIR}.")
    elif usage.free < MIN_FREE_SHARE * usage.total:
        yield _report_warning("disk", f"Only {free} in {settings.STATE_DIR}.")
    else:
        yield _report_ok("disk", f"{free} in {settings.STATE_DIR}.")


def check_files() -> Iterator[Finding]:
    """Check that pages and the worker's wheel are built, and name their versions."""
    if (settings.DIST / "manifest.json").exists():
        yield _report_ok("pages", "Scripts and styles are built.")
    else:
        yield _report_failure("pages", "Scripts and styles are missing: run frontend/build.py.")
    yield _report_ok("version", f"This site runs Barnraise {__version__}.")
    wheel = find_wheel()
    if wheel is None:
        yield _report_warning("worker", "There is no package at /download/: run make wheel.")
    else:
        yield _report_ok("worker", f"/download/ offers version {wheel.version}.")


def check_backups() -> Iterator[Finding]:
    """Check when the site was last backed up."""
    last = read_last_backup(settings.STATE_DIR)
    if last is None:
        yield _report_warning("backup", "There is none: enable barnraise-backup.timer.")
    elif last.is_late:
        yield _report_warning(
            "backup", f"The last one is {last.age_days:.0f} days old, in {last.folder}."
        )
    else:
        yield _report_ok(
            "backup", f"The last one is {last.age_days * 24:.0f} h old, in {last.folder}."
        )


def _report_ok(part: str, sentence: str) -> Finding:
    return Finding(part, Health.OK, sentence)


def _report_warning(part: str, sentence: str) -> Finding:
    return Finding(part, Health.WARNING, sentence)


def _report_failure(part: str, sentence: str) -> Finding:
    return Finding(part, Health.FAILURE, sentence)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
