"""Provide scripts that call the API with a token."""

import pytest
from helpers.site.script_client import ALL_SCOPES, Script


@pytest.fixture
def script(person, valkey):
    """Return a function that creates a script of a person, by default a new one."""

    def create(user=None, scopes=ALL_SCOPES, **options) -> Script:
        return Script(user or person(), scopes, **options)

    return create
