"""Call the API as a script does, with a token."""

import json

from django.test import Client

from barnraise.protocol import coordinator_messages
from coordinator.tokens.models import SCOPES, Token

ALL_SCOPES = list(SCOPES)


class Script:
    """A script that sends requests with a new token of `user`."""

    def __init__(self, user, scopes=ALL_SCOPES, days: int = 30):
        self.token, self.text = Token.create(user, "script", scopes, days)
        self.client = Client(raise_request_exception=False)

    def send_request(self, method: str, path: str, body=None, text: str | None = None, **headers):
        """Send a request and return the response; every error response must be a problem.

        Args:
            method: The HTTP method.
            path: The path below /api/v1.
            body: The body: bytes, or what is sent as JSON.
            text: The token to send instead of this script's own.
            headers: Other headers.
        """
        content = b"" if body is None else body
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        headers = {"Authorization": f"Bearer {self.text if text is None else text}", **headers}
        response = self.client.generic(
            method, f"/api/v1{path}", content, content_type="application/json", headers=headers
        )
        if response.status_code >= 400:
            problem(response)
        return response


def problem(response) -> coordinator_messages.Problem:
    """Return the problem that a refusal names."""
    return coordinator_messages.Problem.model_validate_json(response.content)
