"""Read a run's text from its source, as documents in a fixed order.

This happens once in a run's life, on the owner's machine. The sources:

    stdlib        this Python's standard library
    huggingface   a dataset's .txt and .jsonl files (also gzipped) or, if it has none, its .parquet
                  files; only those with "train" in their name, if there are any. A location is
                  owner/name/folder@revision#column; the last three are optional
    urls          the same kinds of files, from any public address
    files         files and folders of this machine, as `barnraise prepare RUN PATH…` names them

Each line of a .jsonl file is a document: its "text" or "content". Each row of a Parquet file is a
document (see `parquet.py`). Any other file is cut at line ends into documents of about 64 KiB, so
that a part of it can be held out. The manifest pins the result, whatever the source.

Addresses are untrusted input: a host name that resolves into a private network is refused, and the
connection goes to the very address that was checked. Redirects are checked in the same way.
"""

import gzip
import io
import json
import logging
import os
import socket
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urljoin, urlsplit

import httpx
from blake3 import blake3

from barnraise.errors import TextError
from barnraise.protocol.ip_addresses import is_public_ip, parse_ip
from barnraise.spec import TextSpec, address_problem
from barnraise.text import parquet

log = logging.getLogger("barnraise")

MAX_TEXT_BYTES = 2 << 30  # of a run's text: while it is prepared, it lies in memory once
MAX_LINE_BYTES = 256 << 20  # of a file of text: a line is decompressed at once
PIECE_BYTES = 64 << 10  # of a document that is cut out of a longer file
MAX_REDIRECTS = 5
TIMEOUT_SECONDS = 60.0  # between two pieces of an answer
HUGGING_FACE_URL = "https://huggingface.co"
TEXT_ENDINGS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
PARQUET_ENDING = ".parquet"
FILE_ENDINGS = (PARQUET_ENDING, ".gz")  # of files that are read from the disk
STDLIB_EXCLUDED_FOLDERS = {"test", "tests", "idlelib", "site-packages"}
ResolveAddress = Callable[[str, int], str]  # (host, port) → the IP address to connect to
NamedFile = tuple[str, bytes | Path]  # (name, content); of a Parquet or compressed file its path


def read_documents(text: TextSpec, paths: Sequence[Path] = ()) -> list[bytes]:
    """Read all of a source's documents, each content once.

    Args:
        text: names the source.
        paths: for the source "files": files and folders of this machine.

    Raises:
        TextError: the source cannot be read or holds no text.
    """
    if text.source == "stdlib":
        return list(read_stdlib())
    if text.source == "files" and not paths:
        raise TextError(
            "the text of this run is on its owner's machine: "
            "run `barnraise prepare RUN PATH…` there"
        )
    with TextFetcher() as fetcher:
        column = ""
        match text.source:
            case "huggingface":
                files = fetch_dataset(fetcher, text.places[0])
                column = text.places[0].partition("#")[2]
            case "urls":
                files = (
                    file
                    for address in text.places
                    for file in fetch_file(fetcher, address, address)
                )
            case "files":
                files = read_files(paths)
            case _:
                raise TextError(f"the source '{text.source}' is not one this version can read")
        return deduplicate(
            document for name, content in files for document in split_file(name, content, column)
        )


def read_stdlib() -> Iterator[bytes]:
    """Read the *.py files of this Python's standard library, sorted by path, each content once.

    A copy could otherwise be on both sides of the split. Raises TextError if there are no files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    included = sorted(
        (path.as_posix(), path)
        for path in paths
        if not STDLIB_EXCLUDED_FOLDERS & set(path.parent.parts)
    )
    if not included:
        raise TextError(
            f"there are no *.py files under {root}: this Python came without its library's source"
        )
    seen: set[bytes] = set()
    for _, path in included:
        content = (root / path).read_bytes()
        digest = blake3(content).digest()
        if content and digest not in seen:
            seen.add(digest)
            yield content


def deduplicate(documents: Iterable[bytes]) -> list[bytes]:
    """Collect documents, without empty ones and copies, up to MAX_TEXT_BYTES.

    A copy could otherwise be on both sides of the split. Raises TextError if nothing is left.
    """
    seen: dict[bytes, None] = {}
    size = 0
    for document in documents:
        if size + len(document) > MAX_TEXT_BYTES:
            log.warning(
                "the source holds more than %.1f GB: only the first are used", MAX_TEXT_BYTES / 1e9
            )
            break
        if document.strip() and document not in seen:
            seen[document] = None
            size += len(document)
    if not seen:
        raise TextError("the source holds no text")
    return list(seen)


def split_file(name: str, content: bytes | Path, column: str = "") -> Iterator[bytes]:
    """Split one file into documents, by its name's ending.

    Args:
        name: the file's name.
        content: its bytes; of a Parquet or compressed file its path.
        column: of a Parquet file, the column with the text, if it was named.

    Raises:
        TextError: the file is not what its name says.
    """
    is_compressed = name.endswith(".gz")
    if isinstance(content, Path) and not is_compressed:
        yield from parquet.read_texts(content, name, column)
        return
    plain_name = name.removesuffix(".gz")
    split = _split_jsonl if plain_name.endswith(".jsonl") else _split_text
    try:
        with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
            # Decompressed a line at a time: a few kilobytes may stand for gigabytes.
            stream = gzip.GzipFile(fileobj=file) if is_compressed else file
            yield from split(plain_name, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise TextError(f"{name} is not whole: {error}") from None


def _read_line(file: io.BufferedIOBase, name: str) -> bytes:
    """Read one line with its end; b"" at the end of the file.

    Raises:
        TextError: the line is too long to be text.
    """
    line = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise TextError(f"{name} has a line of more than {MAX_LINE_BYTES / 1e6:,.0f} MB")
    return line


def _split_text(name: str, file: io.BufferedIOBase) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece + (b"" if piece.endswith(b"\n") else _read_line(file, name))


def _split_jsonl(name: str, file: io.BufferedIOBase) -> Iterator[bytes]:
    for number, line in enumerate(iter(lambda: _read_line(file, name), b""), 1):
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


def read_files(paths: Sequence[Path]) -> Iterator[NamedFile]:
    """Read files, and all files inside folders in the order of their paths."""
    for path in paths:
        if not path.exists():
            raise TextError(f"there is no {path}")
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in inside:
            yield file.name, file if file.name.endswith(FILE_ENDINGS) else file.read_bytes()


def fetch_file(fetcher: "TextFetcher", name: str, url: str) -> Iterator[NamedFile]:
    """Fetch one address. A Parquet file, or one that is compressed, goes to the disk.

    It stays there only until the next item is requested.
    """
    if urlsplit(url).path.lower().endswith(FILE_ENDINGS):
        with fetcher.fetch_to_file(url) as path:
            yield name, path
    else:
        yield name, fetcher.fetch(url)


def fetch_dataset(fetcher: "TextFetcher", location: str) -> Iterator[NamedFile]:
    """Fetch the text files of a Hugging Face dataset, all at one commit.

    The variable HF_TOKEN, if it is set, opens gated datasets.
    """
    whole, _, revision = location.partition("#")[0].partition("@")
    owner, title, *folders = whole.split("/")
    name = f"{owner}/{title}"
    folder = "".join(f"{part}/" for part in folders)
    hub = _hub_url()
    description = fetcher.fetch(
        f"{hub}/api/datasets/{name}/revision/{quote(revision or 'main', safe='')}"
    )
    try:
        fields = json.loads(description)
        commit = str(fields["sha"])
        files = sorted(str(sibling["rfilename"]) for sibling in fields["siblings"])
    except (ValueError, LookupError, TypeError):
        raise TextError(f"{hub} does not describe the dataset {name}") from None
    for file in choose_files(whole, [file for file in files if file.startswith(folder)]):
        log.info("fetching %s of %s", file, name)
        url = f"{hub}/datasets/{name}/resolve/{quote(commit)}/{quote(file)}"
        yield from fetch_file(fetcher, file.lower(), url)


def choose_files(name: str, files: Sequence[str]) -> list[str]:
    """Choose the files that hold a dataset's text, once. Pure.

    Raises:
        TextError: no file holds text, or there are several texts to choose from.
    """
    chosen = [file for file in files if file.lower().endswith(TEXT_ENDINGS)]
    chosen = chosen or [file for file in files if file.lower().endswith(PARQUET_ENDING)]
    chosen = [file for file in chosen if "train" in file.lower()] or chosen
    if not chosen:
        kinds = ", ".join(sorted({Path(file).suffix for file in files} - {""})) or "nothing"
        readable = ", ".join((*TEXT_ENDINGS, PARQUET_ENDING))
        raise TextError(f"the dataset {name} holds {kinds}; this version reads {readable}")
    folders = sorted({file.rpartition("/")[0] for file in chosen})
    # Parquet files in several folders are separate texts, or the same text several times.
    if len(folders) > 1 and chosen[0].lower().endswith(PARQUET_ENDING):
        shown = ", ".join(folder or "its top" for folder in folders[:10])
        raise TextError(
            f"the dataset {name} holds several texts: name one as owner/name/folder, of {shown}"
        )
    return chosen


def resolve_public(host: str, port: int) -> str:
    """Resolve a host name to an IP address that anybody can reach.

    Raises:
        TextError: it has no address, or one of them is in a private range. The one who named such a
            host would make this machine read its own network.
    """
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TextError(f"{host} has no address: {error}") from None
    addresses = [parse_ip(str(entry[4][0])) for entry in resolved]
    for address in addresses:
        if not is_public_ip(address):
            raise TextError(
                f"{host} leads to {address}, inside a private network: it is not fetched"
            )
    return str(addresses[0])


class TextFetcher:
    """Fetch addresses, bounded in size and time, from where `resolve` allows a connection."""

    def __init__(self, resolve: ResolveAddress = resolve_public) -> None:
        self._resolve = resolve
        self._http = httpx.Client(
            timeout=TIMEOUT_SECONDS, trust_env=False, headers={"User-Agent": "barnraise"}
        )

    def __enter__(self) -> "TextFetcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def fetch(self, url: str) -> bytes:
        """Fetch an address into memory. Raises TextError, with the address, for any failure."""
        body = io.BytesIO()
        self._fetch_into(url, body)
        return body.getvalue()

    @contextmanager
    def fetch_to_file(self, url: str) -> Iterator[Path]:
        """Fetch an address into a temporary file that exists inside the `with` block."""
        with tempfile.TemporaryDirectory(prefix="barnraise-") as folder:
            path = Path(folder) / "fetched"
            try:
                with path.open("wb") as file:
                    self._fetch_into(url, file)
            except OSError as error:
                raise TextError(f"{url} does not fit on the disk: {error}") from None
            yield path

    def _fetch_into(self, url: str, target: BinaryIO) -> None:
        """Write what `url` holds into `target`, following redirects."""
        requested_url = url
        for _ in range(MAX_REDIRECTS + 1):
            if self._resolve is resolve_public and (problem := address_problem(url)):
                raise TextError(f"{url} {problem}")
            try:
                status, location = self._request(url, target)
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
                raise TextError(f"{requested_url} could not be fetched: {reason}") from None
            if status == 200:
                return
            if status not in (301, 302, 303, 307, 308) or not location:
                raise TextError(f"{requested_url} answered {status}")
            url = urljoin(url, location)
        raise TextError(f"{requested_url} redirects from one address to the next without end")

    def _request(self, url: str, target: BinaryIO) -> tuple[int, str]:
        """Request `url` from the very address that was checked.

        Returns:
            The status and the `Location` header; the body of a 200 is written into `target`.
        """
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = self._resolve(host, port)
        netloc = f"[{address}]" if ":" in address else address
        headers = {"Host": parts.netloc}
        token = os.environ.get("HF_TOKEN")
        if token and url.startswith(_hub_url() + "/"):
            headers["Authorization"] = f"Bearer {token}"
        checked_url = parts._replace(netloc=f"{netloc}:{port}", fragment="").geturl()
        size = 0
        with self._http.stream(
            "GET", checked_url, headers=headers, extensions={"sni_hostname": host}
        ) as response:
            if response.status_code == 200:
                for piece in response.iter_bytes():
                    size += target.write(piece)
                    if size > MAX_TEXT_BYTES:
                        raise TextError(f"{url} holds more than {MAX_TEXT_BYTES / 1e9:.1f} GB")
            return response.status_code, response.headers.get("location", "")


def _hub_url() -> str:
    return os.environ.get("HF_ENDPOINT", HUGGING_FACE_URL).rstrip("/")
