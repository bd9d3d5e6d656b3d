"""Test how failures of connections are described, and requests of a client that was closed."""

import httpx
import pytest

from barnraise.protocol.coordinator_messages import Problem
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


def test_request_of_a_closed_client_fails_like_any_other():
    client = SignedHttpClient("http://127.0.0.1:1", Identity(b"a" * 32), "b" * 64)
    client.close()
    with pytest.raises(RequestFailedError, match="was not asked: the client is closed"):
        client.request("GET", "/mirror", None, Problem)
