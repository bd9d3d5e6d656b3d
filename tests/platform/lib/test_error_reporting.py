"""Test that errors are reported only where a variable says so, and without personal data."""

import sys
import types

import pytest

from coordinator.lib.environment import SettingError
from coordinator.lib.error_reporting import remove_personal_data, start


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    with pytest.raises(SettingError, match="needs the package sentry-sdk"):
        start("https://key@errors.example.org/1", "Barnraise")


def test_settings_send_neither_bodies_nor_variables(monkeypatch):
    given = {}
    package = types.SimpleNamespace(init=lambda **options: given.update(options))
    monkeypatch.setitem(sys.modules, "sentry_sdk", package)
    start("https://key@errors.example.org/1", "Mirror 2")
    assert given["server_name"] == "Mirror 2" and given["send_default_pii"] is False
    assert given["max_request_body_size"] == "never" and not given["include_local_variables"]


def test_events_name_no_people_and_no_addresses():
    event = {
        "user": {"id": 1},
        "request": {"method": "GET", "url": "https://x/?token=1", "headers": {"Cookie": "a"}},
        "message": "broken",
    }
    assert remove_personal_data(event, None) == {"request": {"method": "GET"}, "message": "broken"}
