"""Addresses are fetched, only public ones, and again where that may help."""

import gzip
import socket

import pytest
from helpers.network.local_server import LocalServer, QuietHandler
from helpers.worker.text_files import BYTES

from barnraise.errors import TextError
from barnraise.spec import address_problem
from barnraise.text import download
from barnraise.text.connection_errors import BUSY_STATUSES
from barnraise.text.download import TextFetcher, resolve_public
from barnraise.text.inspection import inspect_source
from barnraise.text.places import AddressPlace, parse_place
from barnraise.text.reading import open_source


class FakeWeb:
    """A small web server.

    Attributes:
        pages: Maps paths to (status, body, headers).
        requests: The path and the headers of each request, in order.
        failures: What answers the next requests instead.
        allows_ranges: Whether a part of a page can be requested.
    """

    def __init__(self):
        self.pages: dict[str, tuple[int, bytes, dict]] = {}
        self.requests: list[tuple[str, dict]] = []
        self.failures: list = []
        self.allows_ranges = True
        web_server = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                web_server.requests.append((self.path, dict(self.headers)))
                if web_server.failures:
                    web_server.failures.pop(0)(self)
                    return
                status, body, headers = web_server.pages.get(self.path, (404, b"", {}))
                wanted = self.headers.get("Range", "")
                version = self.headers.get("If-Range", headers.get("ETag"))
                is_same = version == headers.get("ETag")
                if status == 200 and wanted and is_same and web_server.allows_ranges:
                    begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
                    status, body = (206, body[begin:]) if begin < len(body) else (416, b"")
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        self._server = LocalServer(Handler)
        self.port = self._server.port

    def url(self, path: str) -> str:
        return f"http://texts.example:{self.port}{path}"

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def web():
    fake = FakeWeb()
    yield fake
    fake.close()


@pytest.fixture
def pauses():
    """Collect the pauses between attempts, instead of waiting."""
    return []


@pytest.fixture
def fetcher(pauses):
    """Resolve every host name to 127.0.0.1 and allow it."""
    with TextFetcher(resolve=lambda host, port: "127.0.0.1", pause=pauses.append) as text_fetcher:
        yield text_fetcher


@pytest.fixture
def fetch(fetcher, tmp_path):
    """Return a function that fetches an address and returns its bytes."""

    def fetch_bytes(url: str) -> bytes:
        fetcher.fetch_to(url, tmp_path / "fetched")
        return (tmp_path / "fetched").read_bytes()

    return fetch_bytes


def test_fetch_connects_to_the_checked_address_with_the_original_host(web, fetch):
    web.pages["/a.txt?x=1"] = 200, b"hello", {}
    assert fetch(web.url("/a.txt?x=1#part")) == b"hello"
    path, headers = web.requests[0]
    assert path == "/a.txt?x=1" and headers["Host"] == f"texts.example:{web.port}"


def test_fetch_follows_a_bounded_number_of_redirects(web, fetch):
    web.pages["/a"] = 302, b"", {"Location": "/b"}
    web.pages["/b"] = 301, b"", {"Location": web.url("/c.txt")}
    web.pages["/c.txt"] = 200, b"there", {}
    web.pages["/loop"] = 302, b"", {"Location": "/loop"}
    assert fetch(web.url("/a")) == b"there"
    with pytest.raises(TextError, match="without end"):
        fetch(web.url("/loop"))


@pytest.mark.parametrize(
    ("status", "reason"),
    [(404, "answered 404"), (500, "answered 500, 6 times"), (204, "answered 204")],
)
def test_fetch_of_a_bad_status_names_the_address(web, fetch, status, reason):
    web.pages["/x"] = status, b"", {}
    with pytest.raises(TextError, match=reason) as error:
        fetch(web.url("/x"))
    assert "texts.example" in str(error.value)


def test_fetch_of_an_endless_answer_is_cut_off(web, fetch, monkeypatch):
    monkeypatch.setattr(download, "MAX_FILE_BYTES", 1000)
    web.pages["/big"] = 200, b"x" * 1001, {}
    with pytest.raises(TextError, match="holds more than"):
        fetch(web.url("/big"))


def test_fetch_without_a_server_raises_a_sentence(fetch):
    with socket.socket() as silent:  # it refuses connections, and nobody else gets its port
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(TextError, match="could not be fetched"):
            fetch(f"http://texts.example:{port}/")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.9",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "fec0::1",
    ],
)
def test_resolve_refuses_a_name_that_leads_into_a_private_network(monkeypatch, address, tmp_path):
    """Also if another of its addresses is public."""
    addresses = [(0, 0, 0, "", ("93.184.215.14", 80)), (0, 0, 0, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: addresses)
    with pytest.raises(TextError, match="inside a private network"):
        resolve_public("innocent.example.org", 80)
    with TextFetcher() as fetcher, pytest.raises(TextError, match="inside a private network"):
        fetcher.fetch_to("http://innocent.example.org/a.txt", tmp_path / "a")


def test_resolve_returns_the_address_of_a_public_name(monkeypatch):
    addresses = [(0, 0, 0, "", ("93.184.215.14", 443))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: addresses)
    assert resolve_public("example.org", 443) == "93.184.215.14"


def test_resolve_of_an_unknown_name_raises_a_sentence(monkeypatch):
    def fail(*arguments, **options):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(TextError, match="has no address"):
        resolve_public("nowhere.example.org", 80)


def test_fetch_refuses_a_redirect_into_a_private_network(web, tmp_path):
    web.pages["/a"] = 302, b"", {"Location": "http://127.0.0.1/secret"}

    def resolve(host: str, port: int) -> str:
        return "127.0.0.1" if host == "texts.example" else resolve_public(host, port)

    with (
        TextFetcher(resolve) as fetcher,
        pytest.raises(TextError, match="inside a private network"),
    ):
        fetcher.fetch_to(web.url("/a"), tmp_path / "a")
    assert len(web.requests) == 1


@pytest.mark.parametrize("location", ["http://[", "http://a..b.example/x", "ftp://b.example/x"])
def test_redirect_to_what_is_no_address_is_a_sentence(web, pauses, tmp_path, location):
    web.pages["/a"] = 302, b"", {"Location": location}

    def resolve(host: str, port: int) -> str:
        return "127.0.0.1" if host == "texts.example" else resolve_public(host, port)

    with TextFetcher(resolve, pauses.append) as fetcher, pytest.raises(TextError, match="address"):
        fetcher.fetch_to(web.url("/a"), tmp_path / "a")
    assert not pauses


@pytest.mark.parametrize(
    "url", ["http://[x/", "https://a..b.invalid/x", "https://h:port/#text", "https://[::1]x/"]
)
def test_source_that_is_no_address_is_refused_by_its_spelling(url):
    with pytest.raises(TextError, match="is not an address"):
        parse_place(url)
    assert address_problem(url.partition("#")[0]) == "is not an address"


# ---- failures that pass


def answer(status: int, **headers: str):
    """Return what answers a request with this status."""

    def send(handler: QuietHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return send


def cut_after(size: int, body: bytes, **headers: str):
    """Return what sends only the first bytes of a body and cuts the connection."""

    def send(handler: QuietHandler) -> None:
        handler.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body[:size])
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_RDWR)

    return send


@pytest.mark.parametrize("status", BUSY_STATUSES)
def test_fetch_tries_again_while_a_server_is_busy(web, fetch, pauses, status):
    web.pages["/a"] = 200, b"text", {}
    web.failures = [answer(status), answer(status)]
    assert fetch(web.url("/a")) == b"text" and pauses == [1.0, 2.0]


def test_fetch_waits_as_long_as_the_server_wants(web, fetch, pauses):
    web.pages["/a"] = 200, b"text", {}
    web.failures = [answer(429, Retry_After="7"), answer(503, Retry_After="100000")]
    assert fetch(web.url("/a")) == b"text" and pauses == [7.0, 60.0]


@pytest.mark.parametrize("allows_ranges", [True, False])
def test_fetch_continues_a_download_that_was_cut(web, fetch, allows_ranges):
    body = bytes(range(256)) * 400
    web.pages["/a"] = 200, body, {}
    web.allows_ranges = allows_ranges
    web.failures = [cut_after(50_000, body)]
    assert fetch(web.url("/a")) == body
    assert web.requests[-1][1]["Range"].startswith("bytes=")


def test_download_of_a_file_that_changes_meanwhile_begins_again(web, fetch):
    first, second = b"first version " * 5000, b"second version " * 6000
    web.pages["/a"] = 200, second, {"ETag": '"2"'}
    web.failures = [cut_after(50_000, first, ETag='"1"')]
    assert fetch(web.url("/a")) == second
    assert web.requests[-1][1]["If-Range"] == '"1"'


def test_another_part_than_the_missing_one_is_not_appended(web, fetch):
    body = bytes(range(256)) * 400

    def send_wrong_part(handler: QuietHandler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 10-{len(body) - 1}/{len(body)}")
        handler.send_header("Content-Length", str(len(body) - 10))
        handler.end_headers()
        handler.wfile.write(body[10:])

    web.pages["/a"] = 200, body, {}
    web.failures = [cut_after(50_000, body), send_wrong_part]
    assert fetch(web.url("/a")) == body


def test_fetch_gives_up_with_the_number_of_attempts(web, fetch, pauses):
    web.failures = [answer(503)] * 6
    with pytest.raises(TextError, match=r"answered 503, 6 times in a row"):
        fetch(web.url("/a"))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


# ---- what an address holds


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/a.txt.gz", {"Content-Encoding": "gzip"}),
        ("/a.txt", {"Content-Encoding": "gzip"}),
        ("/a.txt.gz?X=1", {}),
        ("/download?file=a", {"Content-Type": "application/gzip"}),
    ],
)
def test_address_is_read_by_its_content(web, fetcher, path, headers):
    text = b"".join(b"Line %d of the text.\n" % i for i in range(50))
    web.pages[path] = 200, gzip.compress(text), headers
    with open_source([AddressPlace(web.url(path))], fetcher=fetcher) as source:
        inspection = inspect_source(source, BYTES)
    assert not inspection.refusal and inspection.bytes == len(text)
    assert [file.path for file in inspection.files] == [web.url(path)]


def test_web_page_instead_of_a_text_is_refused(web, fetcher):
    web.pages["/a.jsonl"] = 200, b"<!DOCTYPE html><html><body>Sign in</body></html>", {}
    with open_source([AddressPlace(web.url("/a.jsonl"))], fetcher=fetcher) as source:
        assert "a web page" in inspect_source(source, BYTES).refusal
