"""One person cannot fill the site with changes, whichever way they are made."""

import pytest
from django.test import Client

from coordinator.lib import period_counters
from coordinator.ops import write_limits
from coordinator.ops.write_limits import count_write
from coordinator.tokens.models import Token

pytestmark = pytest.mark.django_db


def test_flood_of_changes_by_one_person_is_refused_and_others_are_not(person, monkeypatch):
    """A person's program posts forms with a session, and changes with a token."""
    monkeypatch.setattr(write_limits, "WRITE_LIMITS", ((86_400, 3),))
    ada, bob = person("ada@example.org"), person("bob@example.org")
    browser, other = Client(), Client()
    browser.force_login(ada)
    other.force_login(bob)
    answers = [browser.post("/notifications/read/") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [302, 302, 302, 429, 429]
    assert "changed very much" in answers[-1].content.decode()
    assert browser.get("/notifications/").status_code == 200, "reading is no change"
    _, text = Token.create(ada, "script", ["machines:write"], 1)
    answer = Client().post(
        "/api/v1/machines/01890000-0000-7000-8000-000000000001/actions/pause",
        headers={"Authorization": f"Bearer {text}"},
    )
    assert answer.status_code == 429 and "changed very much" in answer.json()["error"]
    assert other.post("/notifications/read/").status_code == 302


def test_writes_are_not_refused_while_valkey_is_away(monkeypatch):
    class GoneError(write_limits.redis.exceptions.ConnectionError):
        pass

    def raise_gone() -> None:
        raise GoneError

    monkeypatch.setattr(period_counters, "valkey_client", raise_gone)
    assert count_write("ada")
