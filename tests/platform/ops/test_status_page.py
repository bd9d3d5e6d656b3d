"""Test the public page of the site's status, and that programs still get JSON."""

import time

import pytest
from django.test import Client

from barnraise import __version__
from coordinator.lib import heartbeats

pytestmark = pytest.mark.django_db
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_programs_get_json_and_browsers_a_page(valkey, built_frontend):
    for accept in ("*/*", "application/json"):
        answer = Client().get("/status", headers={"Accept": accept})
        assert answer.json()["state"] and "Accept" in answer["Vary"]
    page = Client().get("/status", headers={"Accept": BROWSER}).content.decode()
    assert "Everything works." in page and "Machines reporting here" in page
    assert f"version {__version__}." in page


def test_page_names_what_is_delayed(valkey, built_frontend):
    valkey.hset(heartbeats.KEY, heartbeats.Part.REPORTS, time.time() - 60)
    page = Client().get("/status", headers={"Accept": BROWSER}).content.decode()
    assert "A part of this site does not work" in page and "nothing is lost" in page
    assert page.count(">Delayed<") == 1
