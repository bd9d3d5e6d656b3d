"""Test how failures of connections are described."""

import httpx
import pytest

from barnraise.protocol.signed_http import describe_failure


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
