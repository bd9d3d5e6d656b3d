"""Test the API against its OpenAPI document with thousands of valid and invalid requests.

No response may be a server error or differ from the document.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.api import authentication
from coordinator.api.ninja_api import api
from coordinator.ops import write_limits
from coordinator.runs.invitations import RunInvitation
from coordinator.tokens.models import SCOPES, Token

PATIENCE = 900  # seconds; alone it takes 160, and other processes may use the machine
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "response_schema_conformance",
    "content_type_conformance",
)


def test_points_of_curves_are_no_tuples_which_clients_misread():
    """Schemathesis turns `prefixItems` of a response into `items`, which its own check refuses."""
    history = api.get_openapi_schema()["components"]["schemas"]["HistoryOut"]
    assert "curves" in history["properties"] and '"prefixItems"' not in json.dumps(history)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_api_fuzzed_requests_get_documented_responses(
    live_server, person, draft, volunteer, monkeypatch, tmp_path
):
    monkeypatch.setattr(authentication, "MAX_TOKEN_REQUESTS", 10**9)
    monkeypatch.setattr(write_limits, "WRITE_LIMITS", ())
    monkeypatch.setattr(authentication, "MAX_FAILURES", 10**9)
    ada = person()
    volunteer(ada)
    RunInvitation.create(draft(ada, name="alpha"))
    _, text = Token.create(ada, "schemathesis", list(SCOPES), 1)
    command = [
        Path(sys.executable).with_name("schemathesis"),
        "run",
        f"{live_server.url}/api/v1/openapi.json",
        f"--header=Authorization: Bearer {text}",
        "--max-examples=8",
        "--phases=examples,coverage,fuzzing",
        f"--checks={','.join(CHECKS)}",
        "--generation-deterministic",
        "--no-color",
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "0 generated" not in result.stdout
