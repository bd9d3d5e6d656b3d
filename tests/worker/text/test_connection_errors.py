"""Errors of a connection refuse a text; errors of a file leave it out of a folder."""

import httpx
import pytest

from barnraise.errors import TextError, TextUnreachableError
from barnraise.text.connection_errors import is_busy, is_connection_error
from barnraise.text.hub_files import hub_errors

REQUEST = httpx.Request("GET", "https://hub.example.org/a.txt")


def caused_by(cause: Exception) -> Exception:
    """Return an error as libraries raise it when another one has ended a request."""
    try:
        raise ValueError("no file") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_connection", "busy"),
    [
        (httpx.ReadTimeout("slow"), True, False),
        (ConnectionResetError(104, "reset"), True, False),
        (httpx.HTTPStatusError("503", request=REQUEST, response=httpx.Response(503)), True, True),
        (ValueError("not a table"), False, False),
        (OSError(5, "Input/output error"), False, False),
    ],
)
def test_connection_error_is_distinguished_from_that_of_a_file(error, is_connection, busy):
    for each in (error, caused_by(error)):
        assert (is_connection_error(each), is_busy(each)) == (is_connection, busy)
        with pytest.raises(TextError) as raised, hub_errors("owner/name/a.txt"):
            raise each
        assert isinstance(raised.value, TextUnreachableError) == is_connection
