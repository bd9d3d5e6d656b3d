"""Text sources: only public addresses are fetched; reading twice gives the same documents."""

import gzip
import io
import json
import socket
import sys
import sysconfig
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hypothesis.strategies as st
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from pyarrow import parquet

from barnraise.errors import TextError
from barnraise.spec import TextSpec
from barnraise.text import parquet as parquet_module
from barnraise.text import sources
from barnraise.text.parquet import read_texts
from barnraise.text.sources import (
    TextFetcher,
    deduplicate,
    fetch_dataset,
    read_documents,
    read_files,
    read_stdlib,
    resolve_public,
    split_file,
)

ROWS = b'{"text": "one"}\n\n{"content": "two", "id": 2}\n{"text": "one"}\n'


class FakeWeb:
    """A small web server.

    Attributes:
        pages: Maps paths to (status, body, headers).
        requests: The path and the headers of each request, in order.
    """

    def __init__(self):
        self.pages: dict[str, tuple[int, bytes, dict]] = {}
        self.requests: list[tuple[str, dict]] = []
        web_server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web_server.requests.append((self.path, dict(self.headers)))
                status, body, headers = web_server.pages.get(self.path, (404, b"", {}))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def url(self, path: str) -> str:
        return f"http://texts.example:{self.port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web():
    fake = FakeWeb()
    yield fake
    fake.close()


@pytest.fixture
def fetcher():
    """Resolve every host name to 127.0.0.1 and allow it."""
    with TextFetcher(resolve=lambda host, port: "127.0.0.1") as text_fetcher:
        yield text_fetcher


# ---- fetching


def test_fetch_connects_to_the_checked_address_with_the_original_host(web, fetcher):
    web.pages["/a.txt?x=1"] = 200, b"hello", {}
    assert fetcher.fetch(web.url("/a.txt?x=1#part")) == b"hello"
    path, headers = web.requests[0]
    assert path == "/a.txt?x=1" and headers["Host"] == f"texts.example:{web.port}"


def test_fetch_follows_a_bounded_number_of_redirects(web, fetcher):
    web.pages["/a"] = 302, b"", {"Location": "/b"}
    web.pages["/b"] = 301, b"", {"Location": web.url("/c.txt")}
    web.pages["/c.txt"] = 200, b"there", {}
    web.pages["/loop"] = 302, b"", {"Location": "/loop"}
    assert fetcher.fetch(web.url("/a")) == b"there"
    with pytest.raises(TextError, match="without end"):
        fetcher.fetch(web.url("/loop"))


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "answered 404"), (500, "answered 500"), (204, "answered 204")]
)
def test_fetch_of_a_bad_status_names_the_address(web, fetcher, status, reason):
    web.pages["/x"] = status, b"", {}
    with pytest.raises(TextError, match=reason) as error:
        fetcher.fetch(web.url("/x"))
    assert "texts.example" in str(error.value)


def test_fetch_of_an_endless_answer_is_cut_off(web, fetcher, monkeypatch):
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 1000)
    web.pages["/big"] = 200, b"x" * 1001, {}
    with pytest.raises(TextError, match="holds more than"):
        fetcher.fetch(web.url("/big"))


def test_fetch_without_a_server_raises_a_sentence(fetcher):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(TextError, match="could not be fetched"):
        fetcher.fetch(f"http://texts.example:{port}/")


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
def test_resolve_refuses_a_name_that_leads_into_a_private_network(monkeypatch, address):
    """Also if another of its addresses is public."""
    addresses = [(0, 0, 0, "", ("93.184.215.14", 80)), (0, 0, 0, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: addresses)
    with pytest.raises(TextError, match="inside a private network"):
        resolve_public("innocent.example.org", 80)
    with TextFetcher() as fetcher, pytest.raises(TextError, match="inside a private network"):
        fetcher.fetch("http://innocent.example.org/a.txt")


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


def test_fetch_refuses_a_redirect_into_a_private_network(web):
    web.pages["/a"] = 302, b"", {"Location": "http://127.0.0.1/secret"}

    def resolve(host: str, port: int) -> str:
        return "127.0.0.1" if host == "texts.example" else resolve_public(host, port)

    with (
        TextFetcher(resolve) as fetcher,
        pytest.raises(TextError, match="inside a private network"),
    ):
        fetcher.fetch(web.url("/a"))
    assert len(web.requests) == 1


# ---- documents


def test_jsonl_lines_become_documents_without_copies():
    assert deduplicate(split_file("a.jsonl", ROWS)) == [b"one", b"two"]
    assert deduplicate(split_file("a.jsonl.gz", gzip.compress(ROWS))) == [b"one", b"two"]


@pytest.mark.parametrize("line", [b"[1]", b"{}", b'{"text": 3}', b"\xff", b"{" * 5000, b"null"])
def test_jsonl_with_a_bad_line_names_the_line(line):
    with pytest.raises(TextError, match=r"line 2 of a\.jsonl"):
        list(split_file("a.jsonl", b'{"text": "fine"}\n' + line))


def test_split_of_a_broken_gzip_names_the_file():
    with pytest.raises(TextError, match=r"a.txt.gz is not whole"):
        list(split_file("a.txt.gz", gzip.compress(b"x" * 1000)[:20]))


def test_gzip_bomb_is_read_in_bounded_memory(tmp_path):
    """Half a gigabyte of text in half a megabyte."""
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", 1) as file:
        for _ in range(512):
            file.write((b"x" * 1023 + b"\n") * 1024)
    tracemalloc.start()
    try:
        size = sum(len(piece) for piece in split_file(path.name, path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == 512 << 20 and peak < 4 << 20


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt"])
def test_file_of_one_endless_line_is_refused(name, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    content = bytes(100_000)
    with pytest.raises(TextError, match="has a line of more than"):
        list(split_file(name, gzip.compress(content) if name.endswith(".gz") else content))


def test_long_text_is_cut_at_line_ends_without_loss():
    text = b"".join(b"line %d of many\n" % i for i in range(20_000))
    pieces = list(split_file("a.txt", text))
    assert len(pieces) > 3 and b"".join(pieces) == text
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert max(len(piece) for piece in pieces) < sources.PIECE_BYTES + 100


def test_deduplicate_stops_at_the_size_limit(monkeypatch):
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 10)
    assert deduplicate([b"12345", b" ", b"67890", b"x"]) == [b"12345", b"67890"]
    with pytest.raises(TextError, match="no text"):
        deduplicate([b"", b"  \n"])


def test_stdlib_excludes_tests_and_copies():
    files = list(read_stdlib())
    root = Path(sysconfig.get_paths()["stdlib"])
    assert len(files) == len(set(files)) > 300
    assert (root / "json" / "decoder.py").read_bytes() in files
    excluded = [
        path.read_bytes() for name in ("test", "idlelib") for path in (root / name).glob("*.py")
    ]
    assert not {content for content in excluded if len(content) > 200} & set(files)


def test_unknown_source_is_refused_by_name():
    with pytest.raises(TextError, match="wikipedia"):
        read_documents(TextSpec(source="wikipedia"))


def test_files_and_folders_are_read_in_path_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).write_text(name)
    assert [content for _, content in read_files([tmp_path])] == [b"a.txt", b"b.txt", b"sub/c.txt"]
    assert read_documents(TextSpec(source="files"), [tmp_path / "a.txt"]) == [b"a.txt"]
    with pytest.raises(TextError, match="there is no"):
        list(read_files([Path("/nowhere/at/all")]))


def test_text_from_files_without_paths_names_the_command():
    with pytest.raises(TextError, match="barnraise prepare"):
        read_documents(TextSpec(source="files"))


# ---- datasets


@pytest.fixture
def hub(web, monkeypatch):
    """Provide a function that offers files as the dataset owner/name of a fake Hugging Face."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://hub.example:{web.port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def offer(files: dict[str, bytes], sha: str = "abc123") -> None:
        description = {"sha": sha, "siblings": [{"rfilename": name} for name in files]}
        body = json.dumps(description).encode()
        web.pages["/api/datasets/owner/name/revision/main"] = 200, body, {}
        for name, content in files.items():
            web.pages[f"/datasets/owner/name/resolve/{sha}/{name}"] = 200, content, {}

    return offer


def test_dataset_is_read_at_one_commit_training_files_only(web, hub, fetcher):
    hub(
        {
            "README.md": b"no",
            "data/train-2.jsonl": ROWS,
            "data/train-1.txt": b"first",
            "data/test.txt": b"no",
        }
    )
    files = list(fetch_dataset(fetcher, "owner/name"))
    assert files == [("data/train-1.txt", b"first"), ("data/train-2.jsonl", ROWS)]
    assert all("abc123" in path for path, _ in web.requests[1:])
    assert web.requests[0][1]["Authorization"] == "Bearer hf_secret"


def test_dataset_redirect_does_not_forward_the_hub_token(web, hub, fetcher):
    hub({"a.txt": b""})
    web.pages["/datasets/owner/name/resolve/abc123/a.txt"] = (
        302,
        b"",
        {"Location": web.url("/elsewhere.txt")},
    )
    web.pages["/elsewhere.txt"] = 200, b"text", {}
    assert list(fetch_dataset(fetcher, "owner/name")) == [("a.txt", b"text")]
    assert "Authorization" not in web.requests[-1][1]


def test_dataset_without_readable_files_lists_what_it_holds(hub, fetcher):
    hub({"data/a.arrow": b"", "README.md": b""})
    with pytest.raises(
        TextError, match=r"holds \.arrow, \.md; this version reads \.txt, \.jsonl.*\.parquet"
    ):
        list(fetch_dataset(fetcher, "owner/name"))


@pytest.mark.parametrize(
    "description",
    [b"", b"[]", b'{"sha": 1}', b'{"siblings": 3, "sha": "x"}', b'{"siblings": [3], "sha": ""}'],
)
def test_dataset_with_a_malformed_description_is_refused(web, fetcher, monkeypatch, description):
    monkeypatch.setenv("HF_ENDPOINT", f"http://hub.example:{web.port}")
    web.pages["/api/datasets/a/b/revision/v1"] = 200, description, {}
    with pytest.raises(TextError, match="does not describe"):
        list(fetch_dataset(fetcher, "a/b@v1"))


# ---- Parquet


def parquet_file(**columns) -> bytes:
    """Write a real Parquet file with many row groups."""
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    return file.getvalue()


@pytest.fixture
def any_host_is_local(monkeypatch):
    """Resolve every host name to 127.0.0.1 and treat it as public."""
    monkeypatch.setattr(
        sources, "TextFetcher", lambda: TextFetcher(resolve=lambda host, port: "127.0.0.1")
    )


def read_dataset(place: str) -> list[bytes]:
    return read_documents(TextSpec(source="huggingface", places=(place,)))


def test_parquet_dataset_is_read_row_by_row(hub, any_host_is_local):
    first = parquet_file(text=["one", "", "two", "one"], id=[1, 2, 3, 4])
    second = parquet_file(text=["three", None, "vier ü"], id=[1, 2, 3])
    hub(
        {
            "README.md": b"",
            "data/train-0.parquet": first,
            "data/train-1.parquet": second,
            "data/test-0.parquet": b"no",
        }
    )
    assert read_dataset("owner/name") == [b"one", b"two", b"three", "vier ü".encode()]


def test_dataset_prefers_text_files_to_parquet(hub, any_host_is_local):
    hub({"train.txt": b"first", "data/train-0.parquet": parquet_file(text=["the same"])})
    assert read_dataset("owner/name") == [b"first"]


def test_parquet_reads_the_usual_or_the_named_column(hub, any_host_is_local):
    hub({"a.parquet": parquet_file(title=["t"], content=["c"], number=[1])})
    assert read_dataset("owner/name") == [b"c"] and read_dataset("owner/name#title") == [b"t"]
    with pytest.raises(TextError, match="no column of text called 'number'; it has title, content"):
        read_dataset("owner/name#number")
    hub({"a.parquet": parquet_file(question=["q"], answer=["a"])})
    with pytest.raises(TextError, match="question, answer: name one as owner/name#column"):
        read_dataset("owner/name")
    encoded = pyarrow.array(["s", "s", "t"]).dictionary_encode()
    hub({"a.parquet": parquet_file(story=encoded, n=[1, 2, 3])})
    assert read_dataset("owner/name") == [b"s", b"t"], "the only column of text"
    hub({"a.parquet": parquet_file(n=[1, 2, 3])})
    with pytest.raises(TextError, match="nothing to train on"):
        read_dataset("owner/name")


def test_parquet_with_several_texts_needs_a_folder(hub, any_host_is_local):
    hub(
        {
            "small/train.parquet": parquet_file(text=["s"]),
            "large/train.parquet": parquet_file(text=["l"]),
        }
    )
    with pytest.raises(
        TextError, match="several texts: name one as owner/name/folder, of large, small"
    ):
        read_dataset("owner/name")
    assert read_dataset("owner/name/small") == [b"s"]


def test_parquet_is_read_from_urls_and_files(web, any_host_is_local, tmp_path):
    web.pages["/a.parquet"] = 200, parquet_file(text=["far"]), {}
    assert read_documents(TextSpec(source="urls", places=(web.url("/a.parquet"),))) == [b"far"]
    (tmp_path / "b.parquet").write_bytes(parquet_file(text=["near"]))
    assert read_documents(TextSpec(source="files"), [tmp_path]) == [b"near"]


def malformed_files() -> dict[str, bytes]:
    good = parquet_file(text=["some text that is long enough to be worth compressing"] * 50)
    return {
        "empty": b"",
        "not parquet": b"PAR1" + b"x" * 100 + b"PAR1",
        "cut off": good[: len(good) // 2],
        "footer of nonsense": good[:-100] + b"\xff" * 92 + good[-8:],
        "footer longer than the file": good[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1",
        "pages of nonsense": good[:4] + b"\xff" * 200 + good[204:],
    }


@pytest.mark.parametrize("kind", malformed_files())
def test_parquet_that_is_malformed_is_refused_by_name(hub, any_host_is_local, kind):
    hub({"a.parquet": malformed_files()[kind]})
    with pytest.raises(TextError, match=r"a\.parquet cannot be read as a Parquet file"):
        read_dataset("owner/name")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_parquet_with_changed_bytes_is_read_or_refused(tmp_path, data):
    content = bytearray(parquet_file(text=["one", "two", "three"] * 20))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, len(content) - 9))] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    try:
        assert all(isinstance(text, bytes) for text in read_texts(path, "a.parquet"))
    except TextError as error:
        assert str(error).startswith("a.parquet")


def test_parquet_with_an_oversized_row_group_is_refused(hub, any_host_is_local, monkeypatch):
    monkeypatch.setattr(parquet_module, "MAX_ROW_GROUP_BYTES", 10)
    hub({"a.parquet": parquet_file(text=["more than ten bytes of it", "in one group"])})
    with pytest.raises(TextError, match="says that its row group 0 holds"):
        read_dataset("owner/name")


def test_parquet_without_pyarrow_says_what_to_install(hub, any_host_is_local, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    hub({"a.parquet": parquet_file(text=["x"])})
    with pytest.raises(TextError, match=r"pip install 'barnraise\[parquet\]'"):
        read_dataset("owner/name")


def test_parquet_reading_keeps_memory_bounded(tmp_path):
    """One row group holds 200 MB of text and another column of that size."""
    path, count = tmp_path / "a.parquet", 20_000
    rows = pyarrow.array([f"{i:06d}" * 1_700 for i in range(count)])
    parquet.write_table(
        pyarrow.table({"text": rows, "other": rows}), path, row_group_size=count, compression="zstd"
    )
    del rows
    before, peak = pyarrow.total_allocated_bytes(), 0
    for text in read_texts(path, "a.parquet"):
        assert len(text) == 10_200
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert peak < 60_000_000
