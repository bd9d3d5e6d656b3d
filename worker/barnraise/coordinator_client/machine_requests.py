"""Call a coordinator's API for scripts with this machine's key, where a person has no token."""

import secrets
from typing import Any
from urllib.parse import quote, urlencode

from pydantic import RootModel

from barnraise import __version__
from barnraise.coordinator_client.client import (
    MAX_ANSWER_BYTES,
    TIMEOUT_SECONDS,
    describe_problem,
)
from barnraise.coordinator_client.token_client import ANSWER_SECONDS, ScriptClient
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError
from barnraise.protocol.signed_http import (
    HttpOptions,
    ProblemError,
    RequestFailedError,
    SignedHttpClient,
)
from barnraise.state_dir import StateDir


class Json(RootModel[Any]):
    """Any JSON value."""


class MachineRequests(ScriptClient):
    """The coordinator where a machine is enrolled, as the machine's own scripts see it."""

    def __init__(self, state_dir: StateDir) -> None:
        membership = state_dir.membership
        options = HttpOptions(
            user_agent=f"barnraise/{__version__}",
            timeout_seconds=TIMEOUT_SECONDS,
            max_seconds=ANSWER_SECONDS,
            max_bytes=MAX_ANSWER_BYTES,
        )
        self._http = SignedHttpClient(
            membership.url, state_dir.identity, membership.mirror.key, options=options
        )

    def request(self, method: str, *path: str, body: Any = None, **query: Any) -> Any:
        """Send one signed request and return the answer's JSON."""
        address = "/" + "/".join(quote(part, safe="") for part in path)
        if query:
            address += f"?{urlencode(query)}"
        message = None if body is None else Json(body)
        headers = {"X-Request-ID": secrets.token_hex(16)}
        try:
            return self._http.request(method, address, message, Json, headers).root
        except RequestFailedError as error:
            raise CoordinatorUnreachableError(str(error), error.status) from None
        except ProblemError as error:
            kind = CoordinatorUnreachableError if error.status >= 500 else CoordinatorError
            raise kind(describe_problem(error.problem), error.status) from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
