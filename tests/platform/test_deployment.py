"""Test a deployed configuration: Django's checks, cookies for TLS alone, and the mail URL."""

import json
import os
import subprocess
import sys

import pytest
from django.core.management import call_command
from helpers.paths import ROOT

from coordinator.lib import mail_settings

DEPLOYED = {
    "BARNRAISE_HOSTS": "barn.example.org",
    "BARNRAISE_ORIGINS": "https://barn.example.org",
    "BARNRAISE_HTTPS": "1",
    "EMAIL_URL": "smtp://barn:a%40b@mail.example.org:587",
    "EMAIL_FROM": "Barnraise <barn@example.org>",
    "SECRET_KEY": "0123456789abcdefghijklmnop" * 2,
}
PRINT_SETTINGS = """
import json
from django.conf import settings as s
names = [
    "SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SESSION_COOKIE_HTTPONLY",
    "SECURE_HSTS_SECONDS", "DEBUG", "SECURE_SSL_REDIRECT", "EMAIL_HOST_PASSWORD",
    "SITE_URL", "MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN",
]
print(json.dumps({n: getattr(s, n) for n in names}))
"""


def manage(*command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run manage.py with these environment variables."""
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT / "worker")])
    return subprocess.run(
        [sys.executable, ROOT / "manage.py", *command],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_django_checks_find_nothing_in_a_deployed_site(state):
    done = manage("check", "--deploy", "--fail-level", "INFO", **DEPLOYED)
    assert done.returncode == 0, done.stderr
    assert "no issues" in done.stdout


@pytest.mark.django_db
def test_migrations_create_the_tables_of_the_models():
    call_command("makemigrations", check_changes=True, dry_run=True, verbosity=0)  # exits with 1


def test_deployed_site_requires_tls(state):
    values = json.loads(
        manage("shell", "-v", "0", "-c", PRINT_SETTINGS, **DEPLOYED).stdout.strip().splitlines()[-1]
    )
    assert values == {
        "SESSION_COOKIE_SECURE": True,
        "CSRF_COOKIE_SECURE": True,
        "SESSION_COOKIE_HTTPONLY": True,
        "SECURE_HSTS_SECONDS": 31_536_000,
        "DEBUG": False,
        "SECURE_SSL_REDIRECT": True,
        "EMAIL_HOST_PASSWORD": "a@b",
        "SITE_URL": "https://barn.example.org",
        "MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN": False,
    }


def test_hsts_duration_is_a_setting(state):
    shorter = manage("shell", "-v", "0", "-c", PRINT_SETTINGS, **DEPLOYED, BARNRAISE_HSTS="3600")
    assert json.loads(shorter.stdout.strip().splitlines()[-1])["SECURE_HSTS_SECONDS"] == 3600


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("console:", {"EMAIL_BACKEND": "console"}),
        ("file:///var/letters", {"EMAIL_BACKEND": "filebased", "EMAIL_FILE_PATH": "/var/letters"}),
        (
            "smtp://mail",
            {
                "EMAIL_BACKEND": "smtp",
                "EMAIL_PORT": 587,
                "EMAIL_USE_TLS": True,
                "EMAIL_USE_SSL": False,
            },
        ),
        (
            "smtp://mail:25?starttls=0",
            {"EMAIL_PORT": 25, "EMAIL_USE_TLS": False, "EMAIL_USE_SSL": False},
        ),
        (
            "smtps://u:p%2Fq@mail",
            {"EMAIL_PORT": 465, "EMAIL_USE_SSL": True, "EMAIL_HOST_PASSWORD": "p/q"},
        ),
    ],
)
def test_email_url_sets_the_mail_settings(url, expected):
    values = mail_settings.settings(url)
    values["EMAIL_BACKEND"] = values["EMAIL_BACKEND"].split(".")[-2]
    assert values.items() >= expected.items()


@pytest.mark.parametrize("url", ["mail.example.org", "http://mail", "://"])
def test_invalid_email_url_is_refused(url):
    with pytest.raises(ValueError, match="EMAIL_URL must start with"):
        mail_settings.settings(url)
