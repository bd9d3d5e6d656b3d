"""Test answers that harm, how failures are described, and requests of a client that was closed."""

import gzip
import time
import zlib

import httpx
import pytest
import zstandard
from helpers.network.local_server import LocalServer, QuietHandler
from helpers.worker.fake_coordinator import FakeCoordinator

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.token_client import TokenClient
from barnraise.errors import CoordinatorUnreachableError
from barnraise.protocol import clock
from barnraise.protocol.coordinator_messages import MirrorView, Problem
from barnraise.protocol.http_client import describe_failure
from barnraise.protocol.signed_http import RequestFailedError, SignedHttpClient
from barnraise.protocol.signing import Identity


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("[Errno 111] Connection refused", "Connection refused"),
        ("[Errno -2] Name or service not known", "Name or service not known"),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:1006)",
            "certificate verify failed",
        ),
        (
            "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)",
            "it does not speak HTTPS there: check the port, or write http:// in front",
        ),
        ("", "ConnectError"),
    ],
)
def test_reason_of_a_failed_connection_has_no_error_numbers(raw, shown):
    assert describe_failure(httpx.ConnectError(raw)) == shown


@pytest.mark.parametrize("ahead", [0.0, 60.0])
def test_answer_that_a_relay_delays_is_no_wrong_clock(monkeypatch, ahead):
    """The relay of this test delays by tenths of a second, and so much is tolerated."""
    monkeypatch.setattr(clock, "OWNER_CLOCK_SECONDS", 0.4)
    site = FakeCoordinator()
    site.clock_offset = ahead
    answer_at_once = site.routes["GET /mirror"]
    delay = 0.6

    def answer_late(body: bytes):
        answer = answer_at_once(body)
        time.sleep(delay)
        return answer

    site.routes["GET /mirror"] = answer_late
    client = CoordinatorClient(site.url, Identity(b"r" * 32))
    try:
        client.pin_mirror()
        first = client.clock_offset
        assert first is not None and abs(first - ahead) <= delay / 2 + 0.1
        delay = 0.0
        client.pin_mirror()
        known = client.clock_offset
        assert known == pytest.approx(ahead, abs=0.25)
        delay = 0.6
        client.pin_mirror()
        known = client.clock_offset
        assert known == pytest.approx(ahead, abs=delay / 2 + 0.25)
        delay, site.clock_offset = 1.0, ahead + 30
        client.pin_mirror()
        assert client.clock_offset == known, "it came too late to show anything"
    finally:
        client.close()
        site.close()


ZEROS = bytes(1 << 24)  # more than any client reads
COMPRESSED = {
    "gzip": gzip.compress(ZEROS),
    "deflate": zlib.compress(ZEROS),
    "zstd": zstandard.ZstdCompressor().compress(ZEROS),
    "gzip, gzip": gzip.compress(gzip.compress(ZEROS)),
    "identity, zstd": b"{}",
    "a-new-one": b"{}",
}


@pytest.fixture(params=COMPRESSED)
def compressing_site(request):
    """Yield a site that compresses every answer, and the encodings that were asked for."""
    asked: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Accept-Encoding"])
            self.send_response(200)
            self.send_header("Content-Encoding", request.param)
            self.end_headers()
            self.wfile.write(COMPRESSED[request.param])

    server = LocalServer(Handler)
    yield server.url, asked
    server.close()


def test_compressed_answer_of_a_site_or_mirror_is_not_unpacked(compressing_site, monkeypatch):
    """Machines, and mirrors among each other, use this client."""
    monkeypatch.setattr(httpx.Response, "iter_bytes", None)  # which unpacks
    url, asked = compressing_site
    client = SignedHttpClient(url, Identity(b"a" * 32))
    with pytest.raises(RequestFailedError, match="sent a compressed answer"):
        client.request("GET", "/mirror", None, MirrorView)
    assert client.body_bytes == 0 and asked == ["identity"]


def test_compressed_answer_to_a_script_is_not_unpacked(compressing_site):
    url, asked = compressing_site
    with pytest.raises(CoordinatorUnreachableError, match="sent a compressed answer"):
        TokenClient(url, "a-token").request_json("GET", "runs")
    assert asked == ["identity"]


def test_request_of_a_closed_client_fails_like_any_other():
    client = SignedHttpClient("http://127.0.0.1:1", Identity(b"a" * 32), "b" * 64)
    client.close()
    with pytest.raises(RequestFailedError, match="was not asked: the client is closed"):
        client.request("GET", "/mirror", None, Problem)
