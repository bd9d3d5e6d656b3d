"""Test answers that harm, how failures are described, and requests of a client that was closed."""

import gzip
import zlib

import httpx
import pytest
import zstandard
from helpers.network.local_server import LocalServer, QuietHandler

from barnraise.coordinator_client.token_client import TokenClient
from barnraise.errors import CoordinatorUnreachableError
from barnraise.protocol.coordinator_messages import MirrorView, Problem
from barnraise.protocol.signed_http import RequestFailedError, SignedHttpClient, describe_failure
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
        TokenClient(url, "a-token").request("GET", "runs")
    assert asked == ["identity"]


def test_request_of_a_closed_client_fails_like_any_other():
    client = SignedHttpClient("http://127.0.0.1:1", Identity(b"a" * 32), "b" * 64)
    client.close()
    with pytest.raises(RequestFailedError, match="was not asked: the client is closed"):
        client.request("GET", "/mirror", None, Problem)
