"""Open HTTP clients that use the proxies and certificates that the environment names.

All of the worker's HTTP goes through here: to sites and mirrors, to addresses of text and, by
`huggingface_hub`, to the hub.
"""

import contextlib
import re
from collections.abc import Generator
from typing import Any

import httpx
from socksio import ProtocolError

from barnraise.errors import StateError
from barnraise.protocol.answer_deadline import AnswerDeadline
from barnraise.protocol.certificates import trusted_certificates
from barnraise.protocol.proxies import NamedProxy, choose_proxy

# What the system adds to its reasons: "[Errno 111] ", "[SSL: …] ", " (_ssl.c:1006)".
SYSTEM_NOTES = re.compile(r"\[(?:Errno|WinError|SSL)[^\]]*\] ?| \(_ssl\.c:\d+\)")
HANDSHAKE_SECONDS = 20.0  # for a SOCKS proxy to reach a host
PASSWORD_ADVICE = ", write the name and password for it as http://NAME:PASSWORD@HOST:PORT"


def describe_failure(error: Exception) -> str:
    """Return why a connection failed, without the numbers that only programmers know."""
    text = str(error)
    if "WRONG_VERSION_NUMBER" in text:
        return "it does not speak HTTPS there: check the port, or write http:// in front"
    return SYSTEM_NOTES.sub("", text).strip() or type(error).__name__


def describe_route(url: str) -> str:
    """Return by which proxy an answer from an address came, as the end of a sentence about it."""
    proxy = choose_proxy(url)
    return f", through {proxy}" if proxy else ""


def open_http_client(library: Any = httpx, **options: Any) -> Any:
    """Return a `Client` of httpx, or of a library with its interface, with these options.

    Raises:
        StateError: the environment names certificates that cannot be read.
    """
    return library.Client(trust_env=False, transport=EnvironmentTransport(library), **options)


class EnvironmentTransport(httpx.BaseTransport):
    """Send each request through the proxy for its address, and name the proxy in its errors."""

    def __init__(self, library: Any) -> None:
        """Read the certificates."""
        self._library = library
        self._options = {"verify": trusted_certificates(), "trust_env": False}
        self._transports: dict[NamedProxy | None, Any] = {}

    def handle_request(self, request: httpx.Request) -> Any:
        """Send a request; the errors are those of the library."""
        proxy = None
        try:
            proxy = choose_proxy(str(request.url))
            with _limit_socks_handshake(request):
                response = self._open_transport(proxy).handle_request(request)
        except (StateError, UnicodeError) as error:  # the latter for a name that no host can have
            raise self._library.UnsupportedProtocol(str(error)) from None
        except ProtocolError:
            raise self._library.ProxyError(f"{proxy} does not answer as SOCKS 5 demands") from None
        except self._library.TransportError as error:
            if proxy is None:
                raise
            raise type(error)(_describe_proxy_failure(proxy, error)) from error
        if response.status_code == 407 and proxy is not None:
            response.close()
            raise self._library.ProxyError(f"{proxy} refuses: 407{PASSWORD_ADVICE}")
        return response

    def _open_transport(self, proxy: NamedProxy | None) -> Any:
        if proxy not in self._transports:
            options = dict(self._options)
            if proxy is not None:
                context = options["verify"] if proxy.url.startswith("https:") else None
                options["proxy"] = self._library.Proxy(
                    proxy.url, auth=proxy.auth, ssl_context=context
                )
            self._transports[proxy] = self._library.HTTPTransport(**options)
        return self._transports[proxy]

    def close(self) -> None:
        """Close the connections."""
        for transport in list(self._transports.values()):
            transport.close()


@contextlib.contextmanager
def _limit_socks_handshake(request: httpx.Request) -> Generator[None]:
    """Bound the handshake with a SOCKS proxy, for which the library waits without end."""
    deadline = AnswerDeadline(HANDSHAKE_SECONDS)
    outer = request.extensions.get("trace")
    with contextlib.ExitStack() as limit:

        def trace(event: str, info: dict[str, Any]) -> None:
            deadline.remember_connection(event, info)
            if event == "socks.setup_socks5_connection.started":
                limit.enter_context(deadline.limit())
            elif event == "socks.setup_socks5_connection.complete":
                limit.close()
            if outer is not None:
                outer(event, info)

        request.extensions = {**request.extensions, "trace": trace}
        yield


def _describe_proxy_failure(proxy: NamedProxy, error: Exception) -> str:
    """Return why a request through a proxy failed; only some errors are the proxy's own."""
    reason, kind = describe_failure(error), type(error).__name__
    if kind == "ProxyError":
        needs_name = "407" in reason or "username" in reason.lower()
        return f"{proxy} refuses: {reason}" + (PASSWORD_ADVICE if needs_name else "")
    if kind in ("ConnectError", "ConnectTimeout") and "SSL" not in str(error):
        return f"{proxy} does not answer: {reason}"
    return f"{reason}, through {proxy}"
