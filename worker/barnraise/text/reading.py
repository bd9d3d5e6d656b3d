"""Find the files of a run's text, and read their documents in a fixed order.

A file that was named itself must be readable. One that was found in a folder is left out, with the
reason, if it is damaged, in an unknown encoding or without a usable column.
"""

import hashlib
import json
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from barnraise.errors import TextError
from barnraise.spec import TextSpec
from barnraise.text.download import TextFetcher
from barnraise.text.file_choice import LeftOut
from barnraise.text.folder_files import FoundFiles, find_in_path
from barnraise.text.hub_files import find_in_dataset
from barnraise.text.places import (
    AddressPlace,
    HubPlace,
    PathPlace,
    Place,
    parse_dataset,
    parse_place,
)
from barnraise.text.progress import ReportProgress, ignore_progress
from barnraise.text.rows import RenderChat, RowOptions
from barnraise.text.source_file import FileReport, Piece, SourceFile, read_file
from barnraise.text.stdlib_text import read_stdlib


@dataclass
class TextSource:
    """The files of a text, and the choices that were made.

    Attributes:
        files: in the order in which they are read.
        left_out: what is not read, with the reasons.
        warnings: sentences for people.
        scratch: a folder for downloads; it exists while the source is open.
        render_chat: turns a chat into text, if the tokenizer can.
    """

    files: list[SourceFile]
    left_out: list[LeftOut]
    warnings: list[str]
    scratch: Path
    render_chat: RenderChat | None = None

    @property
    def size(self) -> int:
        """Return the bytes of all files, as they are stored."""
        return sum(file.size for file in self.files)

    def fingerprint(self, rendering: str = "") -> str:
        """Return a digest of the files and of how rows become text, by which a kill is survived."""
        described: list[object] = [[file.path, file.size, file.column] for file in self.files]
        described += [rendering] if rendering else []
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def read(self, index: int, report: FileReport) -> Generator[Piece]:
        """Yield the pieces of the documents of file number `index`; fill in its report.

        Raises:
            TextError: the file cannot be used.
        """
        file = self.files[index]
        options = RowOptions(file.column, self.render_chat)
        yield from read_file(file, report, options, self.scratch)

    def leave_out(self, index: int, problem: str) -> None:
        """Leave a file out that turned out to be unusable.

        Raises:
            TextError: the file was named itself.
        """
        self.left_out.append(self.files[index].leave_out(problem))


def places_of(text: TextSpec, paths: Sequence[Path | str] = ()) -> list[Place]:
    """Return the places of a run's text; for the source "files" these paths of this machine.

    Raises:
        TextError: the source is not known, or needs paths.
    """
    match text.source:
        case "stdlib":
            return []
        case "huggingface":
            return [parse_dataset(text.places[0])]
        case "urls":
            return [parse_place(address) for address in text.places]
        case "files" if paths:
            return [parse_place(str(path)) for path in paths]
        case "files":
            raise TextError(
                "the text of this run is on its owner's machine: "
                "run `barnraise prepare RUN PATH…` there"
            )
        case _:
            raise TextError(f"the source '{text.source}' is not one this version can read")


@contextmanager
def open_source(
    places: Sequence[Place],
    folder: Path | None = None,
    progress: ReportProgress = ignore_progress,
    fetcher: TextFetcher | None = None,
) -> Iterator[TextSource]:
    """Find the files of these places; without places, those of the standard library.

    Addresses are downloaded into a folder that is removed at the end.

    Raises:
        TextError: a place cannot be read, or leaves an ambiguous choice.
    """
    with tempfile.TemporaryDirectory(prefix="barnraise-", dir=folder) as name:
        scratch = Path(name)
        found = FoundFiles()
        if not places:
            found.files.append(_stdlib_file(scratch))
        for number, place in enumerate(places):
            found.add(_find(place, scratch, fetcher))
            progress("finding files", number + 1, len(places))
        _remove_repeated(found)
        yield TextSource(found.files, found.left_out, found.warnings, scratch)


def _find(place: Place, scratch: Path, fetcher: TextFetcher | None) -> FoundFiles:
    match place:
        case PathPlace():
            return find_in_path(place.path, place.column)
        case HubPlace():
            return find_in_dataset(place)
        case AddressPlace():
            with nullcontext(fetcher) if fetcher else TextFetcher() as opened:
                return _download(place, scratch, opened)


def _download(place: AddressPlace, scratch: Path, fetcher: TextFetcher) -> FoundFiles:
    """Fetch an address into the scratch folder, under its own name."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    base = urlsplit(place.url).path.rstrip("/").rpartition("/")[2]
    path = folder / ("".join(c for c in base if c.isalnum() or c in "._-")[-100:] or "file")
    fetcher.fetch_to(place.url, path)
    shown = place.url
    try:
        found = find_in_path(path, place.column, is_download=True)
    except TextError as error:
        raise TextError(str(error).replace(str(path), shown)) from None
    renamed = [
        replace(file, path=file.path.replace(str(path), shown, 1), explicit=file.path == str(path))
        for file in found.files
    ]
    left_out = [
        LeftOut(item.path.replace(str(path), shown), item.reason) for item in found.left_out
    ]
    return FoundFiles(renamed, left_out, [w.replace(str(path), shown) for w in found.warnings])


def _stdlib_file(scratch: Path) -> SourceFile:
    """Write the standard library's source as JSON lines, one document a file."""
    path = scratch / "stdlib.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        for content in read_stdlib():
            row = {"text": content.decode("utf-8", errors="replace")}
            lines.write(json.dumps(row) + "\n")
    shown = "the standard library"
    return SourceFile(shown, partial(path.open, "rb"), str(path), path.stat().st_size, True)


def _remove_repeated(found: FoundFiles) -> None:
    """Read a file once that several places name."""
    files: dict[tuple[str, str], SourceFile] = {}
    for file in found.files:
        files.setdefault((file.location or file.path, file.column), file)
    found.files = list(files.values())
