"""Call a coordinator's API from a person's scripts: a personal token, plain JSON in and out."""

import json
import os
import secrets
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from barnraise import __version__
from barnraise.coordinator_client.client import (
    MAX_ANSWER_BYTES,
    TIMEOUT_SECONDS,
    describe_problem,
)
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError, StateError
from barnraise.protocol.coordinator_messages import Problem
from barnraise.protocol.http_client import describe_failure, describe_route, open_http_client
from barnraise.protocol.signed_http import RAW_HEADERS, RequestFailedError, read_raw

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


class TokenClient:
    """One coordinator, as a person's scripts see it: they send a personal token.

    Requests raise CoordinatorError with the site's sentence, or CoordinatorUnreachableError.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        headers = {
            "User-Agent": f"barnraise/{__version__}",
            "Authorization": f"Bearer {token}",
            **RAW_HEADERS,
        }
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=TIMEOUT_SECONDS)
        self._http = open_http_client(timeout=timeout, headers=headers)

    def request_json(self, method: str, *path: str, body: Any = None, **query: Any) -> Any:
        """Send one request and return the answer's JSON.

        The parts of the path are below `/api/v1`; each part is quoted.
        """
        url = f"{self.url}/api/v1/" + "/".join(quote(part, safe="") for part in path)
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-Request-ID": secrets.token_hex(16)}
        answer = bytearray()
        try:
            with self._http.stream(
                method, url, content=content, headers=headers, params=query
            ) as response:
                read_raw(response, answer, MAX_ANSWER_BYTES, self.url)
        except RequestFailedError as error:
            raise CoordinatorUnreachableError(str(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = describe_failure(error)
            raise CoordinatorUnreachableError(f"{self.url} does not answer ({reason})") from None
        status = response.status_code
        try:
            if status < 300:
                return json.loads(answer)
            problem = Problem.model_validate_json(bytes(answer))
        except (ValueError, ValidationError):
            raise CoordinatorUnreachableError(
                f"{self.url} answered {status} with something that is not Barnraise's API"
                + describe_route(self.url),
                status,
            ) from None
        if status >= 500:
            raise CoordinatorUnreachableError(describe_problem(problem), status)
        raise CoordinatorError(describe_problem(problem), status)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
