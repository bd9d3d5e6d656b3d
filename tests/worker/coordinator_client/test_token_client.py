"""Test how long a person's scripts wait for a site that answers late."""

import re
import threading
from collections.abc import Iterator

import pytest
from helpers.network.local_server import LocalServer, QuietHandler

from barnraise.coordinator_client import token_client
from barnraise.coordinator_client.client import TIMEOUT_SECONDS
from barnraise.coordinator_client.token_client import TokenClient
from barnraise.errors import CoordinatorUnreachableError


class LateSite:
    """A site that answers each request after so many seconds, or when it is closed."""

    def __init__(self, seconds: float) -> None:
        self._closing = threading.Event()
        closing = self._closing

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                closing.wait(seconds)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"items": []}')

        self._server = LocalServer(Handler)
        self.url = self._server.url

    def close(self) -> None:
        """Answer what is open and end."""
        self._closing.set()
        self._server.close()


@pytest.fixture
def late_site(request) -> Iterator[LateSite]:
    """Yield a site that answers after `request.param` seconds."""
    site = LateSite(request.param)
    yield site
    site.close()


@pytest.mark.slow  # 16 s
@pytest.mark.parametrize("late_site", [TIMEOUT_SECONDS + 1], indirect=True)
def test_answer_later_than_a_machine_waits_is_returned(late_site):
    assert TokenClient(late_site.url, "a-token").request_json("GET", "estimates") == {"items": []}


@pytest.mark.parametrize("late_site", [60.0], indirect=True)
def test_site_that_never_answers_is_named_in_one_sentence(late_site, monkeypatch):
    monkeypatch.setattr(token_client, "ANSWER_SECONDS", 0.2)
    client = TokenClient(late_site.url, "a-token")
    sentence = re.escape(f"{late_site.url} does not answer (timed out)")
    with pytest.raises(CoordinatorUnreachableError, match=sentence):
        client.request_json("GET", "estimates")
