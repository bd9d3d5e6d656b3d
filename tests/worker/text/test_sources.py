"""Where text comes from: fetched from what is public alone, cut into documents, the same whenever it is read."""

import gzip
import io
import json
import socket
import sys
import threading
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
from barnraise.text.parquet import texts as parquet_texts
from barnraise.text.sources import Fetcher, dataset, documents, once, pieces, public, read

ROWS = b'{"text": "one"}\n\n{"content": "two", "id": 2}\n{"text": "one"}\n'


class Web:
    """A small web: `pages` maps paths to (status, body, headers)."""

    def __init__(self):
        ours, self.pages, self.asked = self, {}, []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                ours.asked.append((self.path, dict(self.headers)))
                status, body, headers = ours.pages.get(self.path, (404, b"", {}))
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
    made = Web()
    yield made
    made.close()


@pytest.fixture
def fetcher():
    """Believes whatever is asked for to be at 127.0.0.1, and allowed."""
    with Fetcher(reach=lambda host, port: "127.0.0.1") as made:
        yield made


# ---- fetching ------------------------------------------------------------------------------------------------------


def test_what_is_fetched_came_from_the_address_that_was_looked_at_under_the_name_that_was_asked(
    web, fetcher
):
    web.pages["/a.txt?x=1"] = 200, b"hello", {}
    assert fetcher.get(web.url("/a.txt?x=1#part")) == b"hello"
    path, headers = web.asked[0]
    assert path == "/a.txt?x=1" and headers["Host"] == f"texts.example:{web.port}"


def test_redirects_are_followed_and_not_for_ever(web, fetcher):
    web.pages["/a"] = 302, b"", {"Location": "/b"}
    web.pages["/b"] = 301, b"", {"Location": web.url("/c.txt")}
    web.pages["/c.txt"] = 200, b"there", {}
    web.pages["/loop"] = 302, b"", {"Location": "/loop"}
    assert fetcher.get(web.url("/a")) == b"there"
    with pytest.raises(TextError, match="without end"):
        fetcher.get(web.url("/loop"))


@pytest.mark.parametrize(
    ("status", "said"), [(404, "answered 404"), (500, "answered 500"), (204, "answered 204")]
)
def test_what_is_not_there_is_said_with_its_address(web, fetcher, status, said):
    web.pages["/x"] = status, b"", {}
    with pytest.raises(TextError, match=said) as error:
        fetcher.get(web.url("/x"))
    assert "texts.example" in str(error.value)


def test_an_answer_without_end_is_cut_off(web, fetcher, monkeypatch):
    monkeypatch.setattr(sources, "MOST", 1000)
    web.pages["/big"] = 200, b"x" * 1001, {}
    with pytest.raises(TextError, match="holds more than"):
        fetcher.get(web.url("/big"))


def test_nobody_answering_is_said(fetcher):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(TextError, match="could not be fetched"):
        fetcher.get(f"http://texts.example:{port}/")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.9", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1"],
)  # fmt: skip
def test_a_name_that_leads_into_a_private_network_is_refused_after_it_was_resolved(
    monkeypatch, address
):
    """Even where another of its addresses is public, and for redirects just the same."""
    found = [(0, 0, 0, "", ("93.184.215.14", 80)), (0, 0, 0, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: found)
    with pytest.raises(TextError, match="inside a private network"):
        public("innocent.example.org", 80)
    with Fetcher() as fetcher, pytest.raises(TextError, match="inside a private network"):
        fetcher.get("http://innocent.example.org/a.txt")


def test_a_public_name_is_connected_to_by_the_address_that_was_looked_at(monkeypatch):
    found = [(0, 0, 0, "", ("93.184.215.14", 443))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: found)
    assert public("example.org", 443) == "93.184.215.14"


def test_a_name_without_an_address_is_said(monkeypatch):
    def nowhere(*asked, **more):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(TextError, match="has no address"):
        public("nowhere.example.org", 80)


def test_a_redirect_into_a_private_network_is_refused(web):
    web.pages["/a"] = 302, b"", {"Location": "http://127.0.0.1/secret"}

    def reach(host: str, port: int) -> str:
        return "127.0.0.1" if host == "texts.example" else public(host, port)

    with Fetcher(reach) as fetcher, pytest.raises(TextError, match="inside a private network"):
        fetcher.get(web.url("/a"))
    assert len(web.asked) == 1


# ---- documents -----------------------------------------------------------------------------------------------------


def test_each_line_of_jsonl_is_a_document_and_copies_count_once():
    assert once(pieces("a.jsonl", ROWS)) == [b"one", b"two"]
    assert once(pieces("a.jsonl.gz", gzip.compress(ROWS))) == [b"one", b"two"]


@pytest.mark.parametrize("line", [b"[1]", b"{}", b'{"text": 3}', b"\xff", b"{" * 5000, b"null"])
def test_a_line_that_is_no_document_is_named(line):
    with pytest.raises(TextError, match=r"line 2 of a\.jsonl"):
        list(pieces("a.jsonl", b'{"text": "fine"}\n' + line))


def test_a_broken_gzip_is_named():
    with pytest.raises(TextError, match=r"a.txt.gz is not whole"):
        list(pieces("a.txt.gz", gzip.compress(b"x" * 1000)[:20]))


def test_a_long_text_is_cut_at_line_ends_and_nothing_of_it_is_lost():
    text = b"".join(b"line %d of many\n" % i for i in range(20_000))
    cut = list(pieces("a.txt", text))
    assert len(cut) > 3 and b"".join(cut) == text
    assert all(each.endswith(b"\n") and len(each) < sources.PIECE + 100 for each in cut)


def test_what_is_past_the_most_is_left_out(monkeypatch):
    monkeypatch.setattr(sources, "MOST", 10)
    assert once([b"12345", b" ", b"67890", b"x"]) == [b"12345", b"67890"]
    with pytest.raises(TextError, match="no text"):
        once([b"", b"  \n"])


def test_files_and_folders_are_read_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).write_text(name)
    assert [content for _, content in read([tmp_path])] == [b"a.txt", b"b.txt", b"sub/c.txt"]
    assert documents(TextSpec(source="files"), [tmp_path / "a.txt"]) == [b"a.txt"]
    with pytest.raises(TextError, match="there is no"):
        list(read([Path("/nowhere/at/all")]))


def test_text_from_files_needs_its_owners_machine():
    with pytest.raises(TextError, match="barnraise seed"):
        documents(TextSpec(source="files"))


# ---- a dataset -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(web, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://hub.example:{web.port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def offer(files: dict[str, bytes], sha: str = "abc123") -> None:
        told = {"sha": sha, "siblings": [{"rfilename": name} for name in files]}
        web.pages["/api/datasets/owner/name/revision/main"] = 200, json.dumps(told).encode(), {}
        for name, content in files.items():
            web.pages[f"/datasets/owner/name/resolve/{sha}/{name}"] = 200, content, {}

    return offer


def test_a_dataset_is_read_at_one_commit_its_training_files_alone(web, hub, fetcher):
    hub(
        {
            "README.md": b"no",
            "data/train-2.jsonl": ROWS,
            "data/train-1.txt": b"first",
            "data/test.txt": b"no",
        }
    )
    found = list(dataset(fetcher, "owner/name"))
    assert found == [("data/train-1.txt", b"first"), ("data/train-2.jsonl", ROWS)]
    assert all("abc123" in path for path, _ in web.asked[1:])
    assert web.asked[0][1]["Authorization"] == "Bearer hf_secret"


def test_the_hubs_token_goes_to_nobody_else(web, hub, fetcher):
    hub({"a.txt": b""})
    web.pages["/datasets/owner/name/resolve/abc123/a.txt"] = (
        302,
        b"",
        {"Location": web.url("/elsewhere.txt")},
    )
    web.pages["/elsewhere.txt"] = 200, b"text", {}
    assert list(dataset(fetcher, "owner/name")) == [("a.txt", b"text")]
    assert "Authorization" not in web.asked[-1][1]


def test_a_dataset_without_files_this_version_reads_says_what_it_holds(hub, fetcher):
    hub({"data/a.arrow": b"", "README.md": b""})
    with pytest.raises(
        TextError, match=r"holds \.arrow, \.md; this version reads \.txt, \.jsonl.*\.parquet"
    ):
        list(dataset(fetcher, "owner/name"))


@pytest.mark.parametrize(
    "told",
    [b"", b"[]", b'{"sha": 1}', b'{"siblings": 3, "sha": "x"}', b'{"siblings": [3], "sha": ""}'],
)
def test_a_hub_that_talks_nonsense_is_refused(web, fetcher, monkeypatch, told):
    monkeypatch.setenv("HF_ENDPOINT", f"http://hub.example:{web.port}")
    web.pages["/api/datasets/a/b/revision/v1"] = 200, told, {}
    with pytest.raises(TextError, match="does not describe"):
        list(dataset(fetcher, "a/b@v1"))


# ---- Parquet -------------------------------------------------------------------------------------------------------


def stored(**columns) -> bytes:
    """A real file, of many row groups."""
    into = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), into, row_group_size=2)
    return into.getvalue()


@pytest.fixture
def here(monkeypatch):
    """Whoever is named is at 127.0.0.1, and public."""
    monkeypatch.setattr(sources, "Fetcher", lambda: Fetcher(reach=lambda host, port: "127.0.0.1"))


def text_of(place: str) -> list[bytes]:
    return documents(TextSpec(source="huggingface", places=(place,)))


def test_a_dataset_that_is_stored_as_parquet_is_read_row_by_row(hub, here):
    one, two = (
        stored(text=["one", "", "two", "one"], id=[1, 2, 3, 4]),
        stored(text=["three", None, "vier ü"], id=[1, 2, 3]),
    )
    hub(
        {
            "README.md": b"",
            "data/train-0.parquet": one,
            "data/train-1.parquet": two,
            "data/test-0.parquet": b"no",
        }
    )
    assert text_of("owner/name") == [b"one", b"two", b"three", "vier ü".encode()]


def test_text_files_are_taken_before_the_same_in_parquet(hub, here):
    hub({"train.txt": b"first", "data/train-0.parquet": stored(text=["the same"])})
    assert text_of("owner/name") == [b"first"]


def test_of_several_columns_the_usual_one_is_read_or_the_one_that_is_named(hub, here):
    hub({"a.parquet": stored(title=["t"], content=["c"], number=[1])})
    assert text_of("owner/name") == [b"c"] and text_of("owner/name#title") == [b"t"]
    with pytest.raises(TextError, match="no column of text called 'number'; it has title, content"):
        text_of("owner/name#number")
    hub({"a.parquet": stored(question=["q"], answer=["a"])})
    with pytest.raises(TextError, match="question, answer: name one as owner/name#column"):
        text_of("owner/name")
    hub(
        {"a.parquet": stored(story=pyarrow.array(["s", "s", "t"]).dictionary_encode(), n=[1, 2, 3])}
    )
    assert text_of("owner/name") == [b"s", b"t"], "the only text there is"
    hub({"a.parquet": stored(n=[1, 2, 3])})
    with pytest.raises(TextError, match="nothing to train on"):
        text_of("owner/name")


def test_of_several_texts_one_must_be_named_by_its_folder(hub, here):
    hub({"small/train.parquet": stored(text=["s"]), "large/train.parquet": stored(text=["l"])})
    with pytest.raises(
        TextError, match="several texts: name one as owner/name/folder, of large, small"
    ):
        text_of("owner/name")
    assert text_of("owner/name/small") == [b"s"]


def test_parquet_comes_from_addresses_and_files_as_well(web, here, tmp_path):
    web.pages["/a.parquet"] = 200, stored(text=["far"]), {}
    assert documents(TextSpec(source="urls", places=(web.url("/a.parquet"),))) == [b"far"]
    (tmp_path / "b.parquet").write_bytes(stored(text=["near"]))
    assert documents(TextSpec(source="files"), [tmp_path]) == [b"near"]


def hostile() -> dict[str, bytes]:
    good = stored(text=["some text that is long enough to be worth compressing"] * 50)
    return {
        "empty": b"",
        "not parquet": b"PAR1" + b"x" * 100 + b"PAR1",
        "cut off": good[: len(good) // 2],
        "footer of nonsense": good[:-100] + b"\xff" * 92 + good[-8:],
        "footer longer than the file": good[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1",
        "pages of nonsense": good[:4] + b"\xff" * 200 + good[204:],
    }


@pytest.mark.parametrize("kind", hostile())
def test_a_hostile_file_is_refused_by_name(hub, here, kind):
    hub({"a.parquet": hostile()[kind]})
    with pytest.raises(TextError, match=r"a\.parquet cannot be read as a Parquet file"):
        text_of("owner/name")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_file_with_any_bytes_changed_is_read_or_refused(tmp_path, data):
    whole = bytearray(stored(text=["one", "two", "three"] * 20))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(4, len(whole) - 9))] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.parquet"
    path.write_bytes(whole)
    try:
        assert all(isinstance(text, bytes) for text in parquet_texts(path, "a.parquet"))
    except TextError as error:
        assert str(error).startswith("a.parquet")


def test_a_row_group_that_says_it_is_endless_is_refused(hub, here, monkeypatch):
    monkeypatch.setattr(parquet_module, "GROUP", 10)
    hub({"a.parquet": stored(text=["more than ten bytes of it", "in one group"])})
    with pytest.raises(TextError, match="says that its row group 0 holds"):
        text_of("owner/name")


def test_a_machine_without_pyarrow_says_what_to_install(hub, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    hub({"a.parquet": stored(text=["x"])})
    with pytest.raises(TextError, match=r"pip install 'barnraise\[parquet\]'"):
        text_of("owner/name")


def test_memory_stays_bounded_whatever_the_file_holds(tmp_path):
    """200 MB of text in one row group, beside a column of as much: page by page, a few rows at a time."""
    path, count = tmp_path / "a.parquet", 20_000
    rows = pyarrow.array([f"{i:06d}" * 1_700 for i in range(count)])
    parquet.write_table(
        pyarrow.table({"text": rows, "other": rows}), path, row_group_size=count, compression="zstd"
    )
    del rows
    before, most = pyarrow.total_allocated_bytes(), 0
    for text in parquet_texts(path, "a.parquet"):
        assert len(text) == 10_200
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert most < 60_000_000
