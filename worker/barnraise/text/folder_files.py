"""Find the files of text in files, folders and archives of this machine.

A link out of a folder, a device or a file that may not be read is left out, like everything that
is not on the allow-list of `file_choice`.
"""

import io
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from barnraise.errors import TextError
from barnraise.text.decompression import ByteStream, OpenFile, damage_named
from barnraise.text.file_choice import (
    ARCHIVE,
    OFFICE,
    LeftOut,
    check_languages,
    choose_split,
    file_reason,
    folder_reason,
    is_about_data,
)
from barnraise.text.file_format import ZIP, find_compression
from barnraise.text.source_file import SourceFile, load_datasets

CARD_NAMES = ("README.md", ".huggingface.yaml")  # of a dataset that states its configurations
# Names that only an office document or a program's archive has inside of it.
_OFFICE_MEMBERS = ("[content_types].xml", "mimetype")
_PROGRAM_MEMBERS = ("meta-inf/manifest.mf", "androidmanifest.xml")


@dataclass
class FoundFiles:
    """The files of a place, and what is left out of it.

    Attributes:
        files: in the order in which they are read.
        left_out: files and folders, with the reason of each.
        warnings: sentences for people.
    """

    files: list[SourceFile] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, other: "FoundFiles") -> None:
        """Append what another place has."""
        self.files += other.files
        self.left_out += other.left_out
        self.warnings += other.warnings


def find_in_path(path: Path, column: str = "") -> FoundFiles:
    """Find the files of text in a file, an archive or a folder.

    Raises:
        TextError: it does not exist, cannot be read, or leaves an ambiguous choice.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            raise TextError(f"there is no {path}") from None
        raise TextError(f"{path} cannot be read: {reason}") from None
    if stat.S_ISDIR(status.st_mode):
        return _find_in_folder(path, column)
    if not stat.S_ISREG(status.st_mode):
        raise TextError(f"{path} is not a file: it is a device, a pipe or a socket")
    file = SourceFile(
        str(path), open_path(path), str(path.absolute()), status.st_size, True, column
    )
    found = FoundFiles([file])
    if is_about_data(path.name):
        found.warnings.append(f"{path} looks like a file about data or a program, not like a text")
    _open_archives(found)
    return found


def open_path(path: Path) -> OpenFile:
    """Return a function that opens a file of this machine."""
    return lambda: cast(ByteStream, path.open("rb"))


def _find_in_folder(root: Path, column: str) -> FoundFiles:
    found = FoundFiles()
    relative = sorted(_walk(root, found.left_out))
    if configured := _read_card(root):
        relative = _select(root, relative, configured, found.left_out, "not in its configuration")
    else:
        try:
            relative, others = choose_split(relative)
            check_languages(relative)
        except TextError as error:
            raise TextError(f"{root}: {error}") from None
        found.left_out += [LeftOut(str(root / other.path), other.reason) for other in others]
    for name in relative:
        path = root / name
        found.files.append(
            SourceFile(
                str(path), open_path(path), str(path.absolute()), path.stat().st_size, False, column
            )
        )
    _open_archives(found)
    found.left_out.sort(key=lambda left_out: left_out.path)
    return found


def _select(
    root: Path, names: Sequence[str], chosen: set[str], left_out: list[LeftOut], reason: str
) -> list[str]:
    left_out += [LeftOut(str(root / name), reason) for name in names if name not in chosen]
    return [name for name in names if name in chosen]


def _walk(root: Path, left_out: list[LeftOut]) -> Iterator[str]:
    """Yield the paths of the files on the allow-list, relative to the folder, with "/"."""

    def report_error(error: OSError) -> None:
        left_out.append(LeftOut(str(error.filename), f"cannot be read: {error.strerror}"))

    for folder, subfolders, names in os.walk(root, onerror=report_error):
        here = Path(folder)
        for name in sorted(subfolders):
            if reason := _subfolder_reason(here / name):
                left_out.append(LeftOut(str(here / name) + os.sep, reason))
                subfolders.remove(name)
        for name in sorted(names):
            path = here / name
            if reason := file_reason(name) or _status_reason(path):
                left_out.append(LeftOut(str(path), reason))
            else:
                yield path.relative_to(root).as_posix()


def _subfolder_reason(path: Path) -> str:
    if path.is_symlink():
        return "a link to another folder"
    try:
        entries = [entry.name for entry in os.scandir(path)]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return folder_reason(path.name, entries)


def _status_reason(path: Path) -> str:
    """Return why a file cannot be read, by what the file system states."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return "a link"
    if not stat.S_ISREG(status.st_mode):
        return "not a file: a device, a pipe or a socket"
    if status.st_size == 0:
        return "empty"
    if not os.access(path, os.R_OK):
        return "cannot be read: permission denied"
    return ""


# ---- the configurations of a dataset's folder --------------------------------------------------


def _read_card(root: Path) -> set[str]:
    """Return the files of the configuration that a dataset's card chooses; none without a card.

    Raises:
        TextError: the card offers several configurations or splits.
    """
    cards = [root / name for name in CARD_NAMES if (root / name).is_file()]
    if not any("configs:" in card.read_text("utf-8", errors="replace") for card in cards):
        return set()
    files = choose_configured_files(str(root), str(root), "", "", None)
    base = root.resolve()
    inside = [Path(file).resolve() for file in files]
    return {path.relative_to(base).as_posix() for path in inside if path.is_relative_to(base)}


def choose_configured_files(
    dataset: str, shown: str, config: str, split: str, revision: str | None
) -> list[str]:
    """Return the files of one configuration and split, as the dataset's own metadata states them.

    Args:
        dataset: a folder, or the dataset's id at the hub.
        shown: its name for errors.
        config: a configuration; "" for the only or the default one.
        split: "" for the training part, or the only one.
        revision: a commit of the hub.

    Raises:
        TextError: the choice is ambiguous or not there; with the choices.
    """
    datasets = load_datasets()
    names: list[str] = datasets.get_dataset_config_names(dataset, revision=revision)
    if config and config not in names:
        raise TextError(f"{shown} has no configuration '{config}'; it has {', '.join(names[:50])}")
    chosen = config or datasets.get_dataset_default_config_name(dataset, revision=revision)
    if not chosen:
        raise TextError(
            f"{shown} has several configurations: name one as {shown}/CONFIG, "
            f"of {', '.join(names[:50])}"
        )
    builder = datasets.load_dataset_builder(dataset, chosen, revision=revision)
    files: dict[str, Any] = builder.config.data_files or {}
    splits = [str(name) for name in files]
    wanted = split or ("train" if "train" in splits else "")
    if not wanted and len(splits) == 1:
        wanted = splits[0]
    if wanted not in splits:
        problem = f"has no split '{split}'" if split else "has no split for training"
        raise TextError(f"{shown} {problem}; it has {', '.join(splits[:50])}")
    return [str(file) for file in files[wanted]]


# ---- archives ----------------------------------------------------------------------------------


def _open_archives(found: FoundFiles) -> None:
    """Replace each zip archive by the files of text in it."""
    files = found.files
    found.files = []
    for file in files:
        try:
            with damage_named(file.path):
                stream = file.open()
                is_archive = find_compression(stream.read(16)) == ZIP
                stream.close()
                if not is_archive:
                    found.files.append(file)
                    continue
                members = _list_members(file, found.left_out)
        except TextError as error:
            _leave_out(file, str(error), found)
            continue
        if not members and not file.explicit and not found.left_out:
            _leave_out(file, ARCHIVE, found)
        found.files += members


def _leave_out(file: SourceFile, reason: str, found: FoundFiles) -> None:
    """Leave a file out; one that was named itself is refused.

    Raises:
        TextError: the file was named itself.
    """
    if file.explicit:
        raise TextError(reason if reason.startswith(file.path) else f"{file.path}: {reason}")
    found.left_out.append(LeftOut(file.path, reason.removeprefix(file.path).lstrip(": ")))


def _list_members(file: SourceFile, left_out: list[LeftOut]) -> list[SourceFile]:
    """Return the files of text in an archive, in the order of their names."""
    with zipfile.ZipFile(_open_seekable(file)) as archive:
        infos = [info for info in archive.infolist() if not info.is_dir()]
    names = {info.filename.casefold() for info in infos}
    if any(name in names for name in _OFFICE_MEMBERS):
        raise TextError(OFFICE)
    if any(name in names for name in _PROGRAM_MEMBERS):
        raise TextError("a program")
    members: list[SourceFile] = []
    for info in sorted(infos, key=lambda info: info.filename):
        shown = f"{file.path}/{info.filename}"
        if reason := _member_reason(info):
            left_out.append(LeftOut(shown, reason))
            continue
        members.append(
            SourceFile(
                shown,
                _open_member(file, info.filename),
                size=info.file_size,
                explicit=False,
                column=file.column,
            )
        )
    if not members:
        raise TextError(f"{ARCHIVE}: none of its {len(infos)} files is a text")
    return members


def _member_reason(info: zipfile.ZipInfo) -> str:
    *folders, _ = info.filename.split("/")
    for folder in folders:
        if reason := folder_reason(folder):
            return reason
    if info.flag_bits & 1:
        return "encrypted"
    return file_reason(info.filename) or ("empty" if info.file_size == 0 else "")


def _open_seekable(file: SourceFile) -> Any:
    """Open an archive for random access; one that is inside of another is read into memory."""
    if file.location and not file.location.startswith("hf://"):
        return Path(file.location).open("rb")
    stream = file.open()
    if hasattr(stream, "seek"):
        return stream
    return io.BytesIO(b"".join(iter(lambda: stream.read(1 << 20), b"")))


def _open_member(file: SourceFile, name: str) -> OpenFile:
    def open_member() -> ByteStream:
        archive = zipfile.ZipFile(_open_seekable(file))
        return cast(ByteStream, archive.open(name))

    return open_member
