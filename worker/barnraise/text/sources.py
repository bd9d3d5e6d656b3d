"""Where a run's text comes from, as documents in a fixed order. Read once in a run's life, on its owner's machine.

    stdlib        this Python's standard library
    huggingface   the .txt and .jsonl files of a dataset (also gzipped) or, where there are none, its .parquet files;
                  those named "train" where there are any. A place is owner/name/folder@revision#column, the last three
                  where they are needed
    urls          the same kinds of files, from anywhere public
    files         files and folders of this machine, as `barnraise seed RUN PATH…` names them

A .jsonl line is a document: its "text" (or "content"); so is a row of Parquet (`parquet.py`). Any other file is cut at
the ends of lines into documents of some 64 KiB, so that a part of it can be held out. What came out is pinned by the
manifest, wherever it came from.

Addresses are somebody's input: a name that leads into a private network is refused after it was resolved, and what is
connected to is the address that was looked at, redirects included.
"""

import gzip
import io
import ipaddress
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urljoin, urlsplit

import httpx

from barnraise.errors import TextError
from barnraise.spec import TextSpec, address_problem
from barnraise.text import parquet, shards

log = logging.getLogger("barnraise")

MOST = 2 << 30  # bytes of a run's text: what is prepared lies in memory once
PIECE = 64 << 10  # bytes of a document cut out of a longer file
HOPS = 5  # redirects
SECONDS = 60.0  # between two pieces of an answer
HUB = "https://huggingface.co"
ENDINGS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
COLUMNS = ".parquet"
Reach = Callable[[str, int], str]  # (host, port) → the address to connect to


def documents(text: TextSpec, paths: Sequence[Path] = ()) -> list[bytes]:
    """All of the source's documents, each content once. `paths`: for the source "files". Raises TextError."""
    if text.source == "stdlib":
        return list(shards.documents("stdlib"))
    if text.source == "files" and not paths:
        raise TextError(
            "the text of this run is on its owner's machine: run `barnraise seed RUN PATH…` there"
        )
    with Fetcher() as fetcher:
        named = {
            "huggingface": lambda: dataset(fetcher, text.places[0]),
            "urls": lambda: (
                each for place in text.places for each in fetched(fetcher, place, place)
            ),
            "files": lambda: read(paths),
        }[text.source]()
        column = text.places[0].partition("#")[2] if text.source == "huggingface" else ""
        return once(piece for name, content in named for piece in pieces(name, content, column))


def once(found: Iterable[bytes]) -> list[bytes]:
    """Without empty documents and copies, which could sit on both sides of the split; up to MOST bytes."""
    seen: dict[bytes, None] = {}
    size = 0
    for document in found:
        if size + len(document) > MOST:
            log.warning("the source holds more than %.1f GB: the first of it are used", MOST / 1e9)
            break
        if document.strip() and document not in seen:
            seen[document] = None
            size += len(document)
    if not seen:
        raise TextError("the source holds no text")
    return list(seen)


def pieces(name: str, content: bytes | Path, column: str = "") -> Iterator[bytes]:
    """The documents of one file, by its name: a Parquet file by its path, of which `column`, where that is said. Raises
    TextError for one that is not what its name says."""
    if isinstance(content, Path):
        yield from parquet.texts(content, name, column)
        return
    if name.endswith(".gz"):
        try:
            with gzip.open(io.BytesIO(content)) as file:
                content, name = file.read(MOST + 1), name.removesuffix(".gz")
        except (OSError, EOFError) as error:
            raise TextError(f"{name} is not whole: {error}") from None
    if name.endswith(".jsonl"):
        yield from _lines(name, content)
        return
    begin = 0
    while begin < len(content):
        end = content.find(b"\n", begin + PIECE) + 1 or len(content)
        yield content[begin:end]
        begin = end


def _lines(name: str, content: bytes) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = next(
                row[field] for field in ("text", "content") if isinstance(row.get(field), str)
            )
        except (ValueError, RecursionError, AttributeError, StopIteration):
            raise TextError(f'line {number} of {name} is not a JSON object with a "text"') from None
        yield text.encode("utf-8", errors="replace")


def read(paths: Sequence[Path]) -> Iterator[tuple[str, bytes | Path]]:
    """(name, content, or of a Parquet file its path) of files; of folders every file in them, by path."""
    for path in paths:
        if not path.exists():
            raise TextError(f"there is no {path}")
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in inside:
            yield file.name, file if file.name.endswith(COLUMNS) else file.read_bytes()


def fetched(fetcher: "Fetcher", name: str, url: str) -> Iterator[tuple[str, bytes | Path]]:
    """(name, content) of one address; a Parquet file lies on the disk until whoever asked asks for the next."""
    if urlsplit(url).path.lower().endswith(COLUMNS):
        with fetcher.kept(url) as path:
            yield name, path
    else:
        yield name, fetcher.get(url)


def dataset(fetcher: "Fetcher", place: str) -> Iterator[tuple[str, bytes | Path]]:
    """(name, content) of a Hugging Face dataset's files, at one commit. HF_TOKEN, where it is set, opens gated ones."""
    whole, _, revision = place.partition("#")[0].partition("@")
    owner, title, *folders = whole.split("/")
    name, folder = f"{owner}/{title}", "".join(f"{each}/" for each in folders)
    hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    about = fetcher.get(f"{hub}/api/datasets/{name}/revision/{quote(revision or 'main', safe='')}")
    try:
        told = json.loads(about)
        commit, files = (
            str(told["sha"]),
            sorted(str(each["rfilename"]) for each in told["siblings"]),
        )
    except (ValueError, LookupError, TypeError):
        raise TextError(f"{hub} does not describe the dataset {name}") from None
    fit = chosen(whole, [file for file in files if file.startswith(folder)])
    for file in fit:
        log.info("fetching %s of %s", file, name)
        yield from fetched(
            fetcher, file.lower(), f"{hub}/datasets/{name}/resolve/{quote(commit)}/{quote(file)}"
        )


def chosen(name: str, files: Sequence[str]) -> list[str]:
    """Of a dataset's files those that are its text, once. Raises TextError where nothing is, or more than one text."""
    fit = [file for file in files if file.lower().endswith(ENDINGS)]
    fit = fit or [file for file in files if file.lower().endswith(COLUMNS)]
    fit = [file for file in fit if "train" in file.lower()] or fit
    if not fit:
        kinds = ", ".join(sorted({Path(file).suffix for file in files} - {""})) or "nothing"
        raise TextError(
            f"the dataset {name} holds {kinds}; this version reads {', '.join((*ENDINGS, COLUMNS))}"
        )
    folders = sorted({file.rpartition("/")[0] for file in fit})
    if len(folders) > 1 and fit[0].lower().endswith(
        COLUMNS
    ):  # each is a text of its own, or the same one again
        shown = ", ".join(folder or "its top" for folder in folders[:10])
        raise TextError(
            f"the dataset {name} holds several texts: name one as owner/name/folder, of {shown}"
        )
    return fit


def public(host: str, port: int) -> str:
    """An address of `host` that anybody can reach. Raises TextError when one of its addresses is in a private range:
    who names such a host would have this machine read its own network."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TextError(f"{host} has no address: {error}") from None
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    for address in addresses:
        real = getattr(address, "ipv4_mapped", None) or address
        if not real.is_global or real.is_multicast:
            raise TextError(
                f"{host} leads to {address}, inside a private network: it is not fetched"
            )
    return str(addresses[0])


class Fetcher:
    """HTTP GETs, bounded in size and time, to where `reach` allows."""

    def __init__(self, reach: Reach = public):
        self._reach = reach
        self._http = httpx.Client(
            timeout=SECONDS, trust_env=False, headers={"User-Agent": "barnraise"}
        )

    def __enter__(self) -> "Fetcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def get(self, url: str) -> bytes:
        """Raises TextError, with the address, for whatever goes wrong."""
        body = io.BytesIO()
        self._fetch(url, body)
        return body.getvalue()

    @contextmanager
    def kept(self, url: str) -> Iterator[Path]:
        """The same in a file, which is there for so long."""
        with tempfile.TemporaryDirectory(prefix="barnraise-") as folder:
            path = Path(folder) / "fetched"
            try:
                with path.open("wb") as file:
                    self._fetch(url, file)
            except OSError as error:
                raise TextError(f"{url} does not fit on the disk: {error}") from None
            yield path

    def _fetch(self, url: str, into: BinaryIO) -> None:
        asked = url
        for _ in range(HOPS + 1):
            if self._reach is public and (problem := address_problem(url)):
                raise TextError(f"{url} {problem}")
            try:
                status, onward = self._ask(url, into)
            except httpx.HTTPError as error:
                raise TextError(
                    f"{asked} could not be fetched: {error or type(error).__name__}"
                ) from None
            if status == 200:
                return
            if status not in (301, 302, 303, 307, 308) or not onward:
                raise TextError(f"{asked} answered {status}")
            url = urljoin(url, onward)
        raise TextError(f"{asked} sends from one address to the next without end")

    def _ask(self, url: str, into: BinaryIO) -> tuple[int, str]:
        """(status, where to go on), from the very address that was looked at; the body of a 200 goes `into`."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        address = self._reach(host, port)
        place = f"[{address}]" if ":" in address else address
        headers = {"Host": parts.netloc}
        if (token := os.environ.get("HF_TOKEN")) and url.startswith(
            os.environ.get("HF_ENDPOINT", HUB).rstrip("/") + "/"
        ):
            headers["Authorization"] = f"Bearer {token}"
        target = parts._replace(netloc=f"{place}:{port}", fragment="").geturl()
        size = 0
        with self._http.stream(
            "GET", target, headers=headers, extensions={"sni_hostname": host}
        ) as response:
            if response.status_code == 200:
                for piece in response.iter_bytes():
                    size += into.write(piece)
                    if size > MOST:
                        raise TextError(f"{url} holds more than {MOST / 1e9:.1f} GB")
            return response.status_code, response.headers.get("location", "")
