"""Download files of text from addresses that a run names.

Addresses are untrusted input: a host name that resolves into a private network is refused, and the
connection goes to the very address that was checked. Redirects are checked in the same way.

Where the environment names a proxy (`protocol/proxies.py`), the proxy resolves the name and
connects. A name that is known here to lead into a private network is still refused.

A busy server (429, 5xx) and a cut connection are tried again, with growing pauses; a download goes
on where it was cut, if the server allows it.
"""

import contextlib
import email.utils
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit

import httpx

from barnraise.errors import TextError
from barnraise.protocol.certificates import trusted_certificates
from barnraise.protocol.http_client import describe_failure, open_http_client
from barnraise.protocol.ip_addresses import is_public_ip, parse_ip
from barnraise.protocol.proxies import choose_proxy
from barnraise.spec import address_problem
from barnraise.text.connection_errors import BUSY_STATUSES

MAX_FILE_BYTES = 1 << 40
MAX_REDIRECTS = 5
TIMEOUT_SECONDS = 60.0  # between two pieces of an answer
ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 1.0  # before the second attempt; each further pause is twice as long
MAX_PAUSE_SECONDS = 60.0
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-")
ResolveAddress = Callable[[str, int], str]  # (host, port) → the IP address to connect to


class UnresolvedHostError(TextError):
    """Report a host name that has no address here; a proxy may know one."""


def resolve_public(host: str, port: int) -> str:
    """Resolve a host name to an IP address that anybody can reach.

    Raises:
        TextError: it has no address, or one of them is in a private range. The one who named such a
            host would make this machine read its own network.
    """
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnresolvedHostError(f"{host} has no address: {error}") from None
    addresses = [parse_ip(str(entry[4][0])) for entry in resolved]
    for address in addresses:
        if not is_public_ip(address):
            raise TextError(
                f"{host} leads to {address}, inside a private network: it is not fetched"
            )
    return str(addresses[0])


@dataclass
class _PartialFile:
    """A file that is being downloaded.

    Attributes:
        file: what has arrived.
        validator: the version at the server that it belongs to (ETag or date), if it states one.
    """

    file: BinaryIO
    validator: str = ""

    @property
    def size(self) -> int:
        """Return the bytes that have arrived."""
        return self.file.tell()

    def clear(self) -> None:
        """Begin again."""
        self.file.seek(0)
        self.file.truncate()

    def range_headers(self) -> dict[str, str]:
        """Return what requests the rest, or all of it if the version has changed meanwhile."""
        if not self.size:
            return {}
        headers = {"Range": f"bytes={self.size}-"}
        return {**headers, "If-Range": self.validator} if self.validator else headers

    def is_continued_by(self, response: httpx.Response) -> bool:
        """Return whether a part of a file is the part that is missing."""
        begin = _CONTENT_RANGE.match(response.headers.get("content-range", ""))
        return begin is None or int(begin[1]) == self.size


class TextFetcher:
    """Fetch addresses from where `resolve` allows a connection, with pauses between attempts."""

    def __init__(
        self,
        resolve: ResolveAddress = resolve_public,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._resolve = resolve
        self._pause = pause
        # The bytes of the file are wanted, as they are: its format is found from its content.
        headers = {"User-Agent": "barnraise", "Accept-Encoding": "identity"}
        self._direct = httpx.Client(
            trust_env=False, timeout=TIMEOUT_SECONDS, headers=headers, verify=trusted_certificates()
        )
        self._proxied = open_http_client(timeout=TIMEOUT_SECONDS, headers=headers)

    def __enter__(self) -> "TextFetcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self._direct.close()
        self._proxied.close()

    def fetch_to(self, url: str, path: Path) -> None:
        """Fetch an address into a file.

        Raises:
            TextError: with the address, for any failure that persists.
        """
        try:
            with path.open("wb") as file:
                self._fetch_into(url, _PartialFile(file))
        except OSError as error:
            raise TextError(f"{url} does not fit on the disk: {error}") from None

    def _fetch_into(self, url: str, partial: _PartialFile) -> None:
        for attempt in range(ATTEMPTS):
            pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)
            try:
                status, headers = self._follow(url, partial)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise TextError(f"{url} is not an address: {error}") from None
            except httpx.HTTPError as error:
                problem = f"could not be fetched: {describe_failure(error)}"
            else:
                if status in (200, 206):
                    return
                problem = f"answered {status}"
                if status == 416 and partial.size:  # the file changed meanwhile
                    partial.clear()
                elif status not in BUSY_STATUSES:
                    raise TextError(f"{url} {problem}")
                pause = min(MAX_PAUSE_SECONDS, max(pause, _find_retry_after(headers)))
            if attempt == ATTEMPTS - 1:
                raise TextError(f"{url} {problem}, {ATTEMPTS} times in a row")
            self._pause(pause)

    def _follow(self, requested_url: str, partial: _PartialFile) -> tuple[int, httpx.Headers]:
        """Request an address, following redirects; append the body to the file."""
        url = requested_url
        for _ in range(MAX_REDIRECTS + 1):
            if self._resolve is resolve_public and (problem := address_problem(url)):
                raise TextError(f"{url} {problem}")
            status, headers = self._request(url, partial)
            location = headers.get("location")
            if status not in (301, 302, 303, 307, 308) or not location:
                return status, headers
            try:
                url = urljoin(url, location)
            except ValueError:
                raise TextError(f"{url} redirects to what is not an address") from None
        raise TextError(f"{requested_url} redirects from one address to the next without end")

    def _request(self, url: str, partial: _PartialFile) -> tuple[int, httpx.Headers]:
        """Request the part of `url` that the file lacks, from the very address that was checked."""
        with self._open(url, partial.range_headers()) as response:
            if response.status_code == 206 and not partial.is_continued_by(response):
                return 416, httpx.Headers()
            if response.status_code == 200:
                partial.clear()
            if response.status_code in (200, 206):
                partial.validator = _find_validator(response)
                for piece in response.iter_raw():
                    partial.file.write(piece)
                    if partial.size > MAX_FILE_BYTES:
                        raise TextError(f"{url} holds more than {MAX_FILE_BYTES / 1e12:.1f} TB")
            return response.status_code, response.headers

    def _open(
        self, url: str, headers: dict[str, str]
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        """Return a request to the address to which a name leads, or to the proxy for it."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if choose_proxy(url) is not None:
            with contextlib.suppress(UnresolvedHostError):
                self._resolve(host, port)
            return self._proxied.stream(
                "GET", parts._replace(fragment="").geturl(), headers=headers
            )
        address = self._resolve(host, port)
        netloc = f"[{address}]" if ":" in address else address
        checked_url = parts._replace(netloc=f"{netloc}:{port}", fragment="").geturl()
        return self._direct.stream(
            "GET",
            checked_url,
            headers={"Host": parts.netloc, **headers},
            extensions={"sni_hostname": host},
        )


def _find_validator(response: httpx.Response) -> str:
    """Return what identifies the version of a file: a strong ETag, or the date of its change."""
    tag = response.headers.get("etag", "")
    return tag if tag.startswith('"') else response.headers.get("last-modified", "")


def _find_retry_after(headers: httpx.Headers) -> float:
    """Return the seconds that a Retry-After header states, as a number or a time."""
    header = headers.get("retry-after", "")
    if header.strip().isdecimal():
        return float(header)
    parsed = email.utils.parsedate_tz(header)
    if parsed is None:
        return 0.0
    return max(0.0, email.utils.mktime_tz(parsed) - time.time())
