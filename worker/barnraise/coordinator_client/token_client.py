"""The coordinator's API for a person's scripts: a personal token, plain JSON in and out."""

import json
import os
import secrets
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from barnraise import __version__
from barnraise.coordinator_client.client import MAX_ANSWER, SECONDS
from barnraise.errors import CoordinatorError, CoordinatorGone, StateError
from barnraise.protocol.coordinator_messages import Problem
from barnraise.state_dir import Home

TOKEN, SITE = "BARNRAISE_TOKEN", "BARNRAISE_SITE"


class Account:
    """Raises CoordinatorError with the site's sentence, or CoordinatorGone."""

    def __init__(self, url: str, token: str):
        self.url = (url if "//" in url else f"https://{url}").rstrip("/")
        headers = {"User-Agent": f"barnraise/{__version__}", "Authorization": f"Bearer {token}"}
        self._http = httpx.Client(timeout=SECONDS, headers=headers)

    @classmethod
    def known(cls, home: Home, site: str = "") -> "Account":
        """By $BARNRAISE_TOKEN; at `site`, $BARNRAISE_SITE, or where this machine is enrolled."""
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            raise StateError(
                f"make a token on the site, under Account, API tokens, and put it into the variable {TOKEN}"
            )
        if not token.isascii() or not token.isprintable():
            raise StateError(f"what {TOKEN} holds is not a token")
        return cls(site or os.environ.get(SITE) or home.membership.url, token)

    def ask(self, method: str, *path: str, body: Any = None, **query: Any) -> Any:
        """What the site answers, as JSON; each part of the path is quoted."""
        where = "/api/v1/" + "/".join(quote(part, safe="") for part in path)
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-Request-ID": secrets.token_hex(16)}
        answer = bytearray()
        try:
            with self._http.stream(
                method, self.url + where, content=sent, headers=headers, params=query
            ) as response:
                for piece in response.iter_bytes():
                    answer += piece
                    if len(answer) > MAX_ANSWER:
                        raise CoordinatorGone(
                            f"{self.url} sent more than {MAX_ANSWER:,} bytes and was cut off"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CoordinatorGone(
                f"{self.url} does not answer ({error or type(error).__name__})"
            ) from None
        try:
            if response.status_code < 300:
                return json.loads(answer)
            problem = Problem.model_validate_json(bytes(answer))
        except (ValueError, ValidationError):
            what = "with something that is not Barnraise's API"
            raise CoordinatorGone(
                f"{self.url} answered {response.status_code} {what}", response.status_code
            ) from None
        details = "".join(f"\n  {field}: {sentence}" for field, sentence in problem.fields.items())
        kind = CoordinatorGone if response.status_code >= 500 else CoordinatorError
        raise kind(problem.error + details, response.status_code)

    def every(self, *path: str) -> list[dict[str, Any]]:
        """All items of a list, page after page."""
        found, after = [], {}
        while True:
            page = self.ask("GET", *path, **after)
            found += page["items"]
            if not page["next"]:
                return found
            after = {"after": page["next"]}

    def close(self) -> None:
        self._http.close()
