"""Test how the first member of the staff gets a password."""

import io
import re

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from coordinator.accounts.management.commands import prepare_owner
from coordinator.accounts.models import User

pytestmark = pytest.mark.django_db
EMAIL = "you@example.org"


def run_command(**options) -> str:
    out = io.StringIO()
    call_command("prepare_owner", email=EMAIL, stdout=out, **options)
    return out.getvalue().strip()


def test_link_sets_the_password_once(valkey, settings, built_frontend):
    settings.SITE_URL = "https://barn.example.org"
    link = run_command(link=True, staff=True)
    user = User.objects.get(email=EMAIL)
    assert user.is_staff and not user.has_usable_password()
    path = re.fullmatch(r"https://barn\.example\.org(/accounts/password/reset/key/\S+)", link)[1]
    client = Client()
    form = client.get(path, follow=True)
    fields = {"password1": "raise-the-frame-7", "password2": "raise-the-frame-7"}
    client.post(form.redirect_chain[-1][0], fields)
    user.refresh_from_db()
    assert user.check_password("raise-the-frame-7")
    assert b"form" not in Client().get(path).content or Client().get(path).status_code == 200


def test_password_is_typed_twice_and_must_be_good(monkeypatch):
    answers = iter(["raise-the-frame-7", "raise-the-frame-7"])
    monkeypatch.setattr(prepare_owner.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(prepare_owner, "getpass", lambda prompt: next(answers))
    run_command()
    assert User.objects.get(email=EMAIL).check_password("raise-the-frame-7")
    for typed, sentence in ((("a", "b"), "differ"), (("short", "short"), "too short")):
        answers = iter(typed)
        with pytest.raises(CommandError, match=sentence):
            run_command()


def test_without_a_terminal_the_command_says_what_to_use(monkeypatch):
    monkeypatch.setattr(prepare_owner.sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(CommandError, match="--link"):
        run_command()
    assert not User.objects.exists()
