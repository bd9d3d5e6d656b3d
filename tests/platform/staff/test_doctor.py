"""Test what `manage.py doctor` finds, against real servers and a proxy that is wrong."""

import io
import json
import threading
import time

import pytest
from django.core.management import CommandError, call_command
from helpers.network.local_server import LocalServer, QuietHandler

from barnraise import __version__
from coordinator.lib import heartbeats
from coordinator.lib.backup_record import record_backup
from coordinator.lib.trusted_proxies import CLIENT_HEADER
from coordinator.staff import doctor
from coordinator.staff.doctor import Health

pytestmark = pytest.mark.django_db


def only(findings) -> doctor.Finding:
    (finding,) = findings
    return finding


@pytest.fixture
def wrong_proxy(settings):
    """Serve what a misconfigured proxy answers; yields the statuses of its next answers."""
    answers: list[int] = []

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status = answers.pop(0)
            self.send_response(status)
            if status == 301:
                self.send_header("Location", settings.SITE_URL)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = LocalServer(Handler)
    settings.SITE_URL = server.url
    yield answers
    server.close()


def test_servers_that_answer_are_found_well(valkey):
    assert only(doctor.check_database()).verdict is Health.OK
    assert only(doctor.check_valkey()).verdict is not Health.FAILURE
    assert only(doctor.check_clock()).verdict is Health.OK


def test_background_parts_that_stand_still_are_named(valkey, monkeypatch):
    monkeypatch.setitem(heartbeats.INTERVALS, heartbeats.Part.EVENTS, 0.5)
    monkeypatch.setitem(heartbeats.INTERVALS, heartbeats.Part.REPORTS, 0.5)
    valkey.hset(heartbeats.KEY, heartbeats.Part.SCHEDULE, time.time() - 90)
    valkey.hdel(heartbeats.KEY, heartbeats.Part.EVENTS)
    heartbeats.forget()
    found = {finding.part: finding for finding in doctor.check_background()}
    assert found["beat"].verdict is Health.FAILURE and "exactly once" in found["beat"].sentence
    assert found["Celery, reports"].verdict is Health.OK
    assert "never advanced" in found["Celery, events"].sentence


def test_part_of_a_site_that_has_just_started_is_waited_for(valkey):
    valkey.hdel(heartbeats.KEY, heartbeats.Part.EVENTS)
    heartbeats.forget()
    timer = threading.Timer(1.5, heartbeats.record, [heartbeats.Part.EVENTS])
    timer.start()
    found = {finding.part: finding.verdict for finding in doctor.check_background()}
    timer.join()
    assert found["Celery, events"] is Health.OK


def test_mail_is_tried_without_sending(settings):
    settings.EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
    assert only(doctor.check_mail()).verdict is Health.WARNING
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 1
    refused = only(doctor.check_mail())
    assert refused.verdict is Health.FAILURE and "refuses" in refused.sentence


@pytest.mark.parametrize(
    ("status", "https", "verdict", "sentence"),
    [
        (301, True, Health.FAILURE, "X-Forwarded-Proto"),
        (400, False, Health.FAILURE, "BARNRAISE_HOSTS must name 127.0.0.1"),
        (200, True, Health.WARNING, "Strict-Transport-Security"),
        (200, False, Health.WARNING, "without TLS"),
    ],
)
def test_address_behind_a_wrong_proxy(wrong_proxy, settings, status, https, verdict, sentence):
    settings.HTTPS = https
    wrong_proxy.append(status)
    found = only(doctor.check_address())
    assert found.verdict is verdict and sentence in found.sentence


def test_site_that_sees_no_addresses_names_the_setting(client, settings, caplog):
    unknown = {"REMOTE_ADDR": ""}
    assert CLIENT_HEADER not in client.get("/api/v1/mirror").headers
    assert CLIENT_HEADER in client.get("/api/v1/mirror", **unknown).headers
    person = {"login": "ada@example.org", "password": "raise-the-frame-7"}
    refused = client.post("/accounts/login/", person, **unknown)
    assert refused.status_code == 403 and "BARNRAISE_PROXIES" in refused.text
    assert "BARNRAISE_PROXIES" in caplog.text, "the staff's pages show what is logged as an error"


@pytest.fixture
def site_without_addresses(settings):
    """Serve what a site answers that listens on a Unix socket unknown to its settings."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header(CLIENT_HEADER, "unknown")
            self.end_headers()

    server = LocalServer(Handler)
    settings.SITE_URL = server.url
    yield
    server.close()


def test_doctor_finds_a_site_that_sees_no_addresses(site_without_addresses):
    found = only(doctor.check_address())
    assert found.verdict is Health.FAILURE and "BARNRAISE_PROXIES" in found.sentence


def test_websockets_that_the_proxy_does_not_pass(wrong_proxy):
    wrong_proxy.append(404)
    blocked = only(doctor.check_websockets())
    assert blocked.verdict is Health.FAILURE and "Upgrade and Connection" in blocked.sentence
    wrong_proxy.append(403)
    assert only(doctor.check_websockets()).verdict is Health.OK, "the site itself refuses so"


def test_missing_and_old_backups_are_warned_of(settings, tmp_path):
    settings.STATE_DIR = tmp_path
    assert "There is none" in only(doctor.check_backups()).sentence
    dump = tmp_path / "database.dump"
    dump.write_bytes(b"x")
    record_backup(tmp_path, [dump])
    assert only(doctor.check_backups()).verdict is Health.OK
    row = json.loads((tmp_path / "last_backup.json").read_text())
    text = json.dumps(row | {"at": row["at"] - 3 * 86_400})
    (tmp_path / "last_backup.json").write_text(text)
    assert "3 days old" in only(doctor.check_backups()).sentence
    (tmp_path / "last_backup.json").write_text("[]")
    assert only(doctor.check_backups()).verdict is Health.WARNING


def test_command_prints_a_line_for_each_part_and_fails(valkey, settings):
    settings.SITE_URL = "http://127.0.0.1:1"
    out = io.StringIO()
    with pytest.raises(CommandError, match="parts of this site do not work"):
        call_command("doctor", json=True, stdout=out)
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert any(row["part"] == "version" and __version__ in row["sentence"] for row in rows)
    verdicts = {row["part"]: row["verdict"] for row in rows}
    assert verdicts["database"] == "ok" and verdicts["address"] == "failure"
    assert {"clock", "disk", "websockets", "backup", "mail", "beat"} <= verdicts.keys()
