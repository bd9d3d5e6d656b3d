"""Test which address the emails of a site name that `manage.py run_site` runs."""

import pytest
from django.core.management import CommandError, call_command

from coordinator.demo.management.commands.run_site import site_address


def test_emails_name_the_port_unless_a_variable_names_the_address(monkeypatch):
    monkeypatch.delenv("BARNRAISE_URL", raising=False)
    monkeypatch.delenv("BARNRAISE_ORIGINS", raising=False)
    assert site_address("0.0.0.0", 8000) == {"BARNRAISE_URL": "http://127.0.0.1:8000"}
    assert site_address("10.1.2.3", 80) == {"BARNRAISE_URL": "http://10.1.2.3:80"}
    monkeypatch.setenv("BARNRAISE_ORIGINS", "https://barn.example.org")
    assert site_address("0.0.0.0", 8000) == {}


@pytest.mark.parametrize("port", ["0", "-1", "99999"])
def test_port_that_is_none_is_refused_before_anything_starts(port):
    with pytest.raises(CommandError, match="--port must be from 1 to 65,535"):
        call_command("run_site", f"--port={port}")
