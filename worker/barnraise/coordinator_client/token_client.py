"""Call a coordinator's API from a person's scripts: a personal token, plain JSON in and out."""

import os

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import StateError
from barnraise.protocol.signing import Identity

TOKEN_VARIABLE = "BARNRAISE_TOKEN"
# A machine asks another mirror when one does not answer in time. A person has named this site, and
# it can take long over an estimate while its computer is busy.
ANSWER_SECONDS = 120.0


def read_token() -> str:
    """Return the token in $BARNRAISE_TOKEN.

    Raises:
        StateError: there is none.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise StateError(
            "create a token on the site, under Account → API tokens, "
            f"and put it into the variable {TOKEN_VARIABLE}"
        )
    if not token.isascii() or not token.isprintable():
        raise StateError(f"the content of {TOKEN_VARIABLE} is not a token")
    return token


class TokenClient(CoordinatorClient):
    """One coordinator, as a person's scripts see it: a personal token stands for signatures."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url, Identity(bytes(32)), timeout_seconds=ANSWER_SECONDS)
        self._token = token

    def authorize(self, method: str, path: str, body: bytes) -> str:
        """Return the token."""
        return f"Bearer {self._token}"
