"""Find the files of text in files, folders and archives of this machine.

A link out of a folder, a device or a file that may not be read is left out, like everything that
is not on the allow-list of `file_choice`.
"""

import contextlib
import io
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from barnraise.errors import TextError
from barnraise.text.decompression import ByteStream, damage_named
from barnraise.text.file_choice import (
    ABOUT_DATA,
    ARCHIVE,
    HIDDEN,
    NO_SUFFIX,
    OFFICE,
    PRIVATE,
    LeftOut,
    check_languages,
    choose_split,
    file_reason,
    folder_reason,
    reasons_by_path,
)
from barnraise.text.file_format import ZIP, find_compression, split_suffixes
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


def find_in_path(path: Path, column: str = "", is_download: bool = False) -> FoundFiles:
    """Find the files of text in a file, also one from an address, an archive or a folder.

    Raises:
        TextError: it does not exist, cannot be read, may be private, or leaves an ambiguous choice.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            raise TextError(f"there is no {path}") from None
        raise TextError(f"{path} cannot be read: {reason}") from None
    if stat.S_ISDIR(status.st_mode):
        _check_folder(path)
        return _find_in_folder(path, column)
    if not stat.S_ISREG(status.st_mode):
        raise TextError(f"{path} is not a file: it is a device, a pipe or a socket")
    file = SourceFile(
        str(path), partial(path.open, "rb"), str(path.absolute()), status.st_size, True, column
    )
    found = FoundFiles([file])
    reason = file_reason(path.name)
    if reason == PRIVATE and not is_download:
        raise TextError(f"{path} {PRIVATE}: rename it if it holds none")
    if reason == ABOUT_DATA:
        found.warnings.append(f"{path} looks like a file about data or a program, not like a text")
    elif reason not in ("", NO_SUFFIX, OFFICE, ARCHIVE):  # their content decides
        found.warnings.append(f"{path}: {reason}; it is read as what its content is")
    open_archives(found)
    return found


def _check_folder(path: Path) -> None:
    """Refuse a named folder that is private or no text: a pattern like `corpus/*` names all."""
    try:
        entries = [entry.name for entry in os.scandir(path)]
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
    reason = folder_reason(path.resolve().name, entries)
    if reason not in ("", HIDDEN):
        raise TextError(f"{path} is not read ({reason}): name the files of its text one by one")


def _find_in_folder(root: Path, column: str) -> FoundFiles:
    found = FoundFiles()
    relative = sorted(_walk(root, found.left_out))
    if configured := _read_card(root):
        others = [
            LeftOut(name, "not in its configuration") for name in relative if name not in configured
        ]
        relative = [name for name in relative if name in configured]
    else:
        try:
            relative, others = choose_split(relative)
            found.warnings += [f"{root}: {warning}" for warning in check_languages(relative)]
        except TextError as error:
            raise TextError(f"{root}: {error}") from None
    found.left_out += [LeftOut(str(root / other.path), other.reason) for other in others]
    for name in relative:
        path = root / name
        size = path.stat().st_size if path.exists() else 0  # one that vanished is left out later
        found.files.append(
            SourceFile(
                str(path), partial(path.open, "rb"), str(path.absolute()), size, False, column
            )
        )
    open_archives(found)
    found.left_out.sort(key=lambda left_out: left_out.path)
    return found


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
        TextError: the card offers several configurations or splits, or cannot be used.
    """
    cards = [root / name for name in CARD_NAMES if (root / name).is_file()]
    if not any(states_configurations(card) for card in cards):
        return set()
    try:
        files = choose_configured_files(str(root), str(root), "", "", None)
    except TextError:
        raise
    except Exception as error:  # datasets raises its own, YAML's and the system's errors
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise TextError(
            f"{root}: its card {cards[0].name} cannot be used: {reason[:200]}"
        ) from None
    base = root.resolve()
    inside = [Path(file).resolve() for file in files]
    chosen = {path.relative_to(base).as_posix() for path in inside if path.is_relative_to(base)}
    if not chosen:
        raise TextError(f"{root}: none of the files that its card {cards[0].name} names is in it")
    return chosen


def states_configurations(card: Path) -> bool:
    """Return whether a dataset's card lists its configurations, in the YAML at its begin."""
    try:
        text = card.read_text("utf-8-sig", errors="replace")
    except OSError:
        return False
    if card.suffix == ".md":
        text = text.partition("\n---")[0] if text.startswith("---") else ""
    return any(line.startswith("configs:") for line in text.splitlines())


def choose_configured_files(
    dataset: str, shown: str, config: str, split: str, revision: str | None
) -> list[str]:
    """Return the files of one configuration and split, as the dataset's own metadata states them.

    The dataset is a folder, or an id at the hub; "" is the default configuration, and the training
    part.

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


def open_archives(found: FoundFiles) -> None:
    """Replace each zip archive by the files of text in it.

    A file of the hub is looked at only if its name is that of an archive: each look takes a while.
    """
    files = found.files
    found.files = []
    for file in files:
        try:
            with damage_named(file.path):
                if not _is_archive(file):
                    found.files.append(file)
                    continue
                members = _list_members(file, found)
        except TextError as error:
            found.left_out.append(file.leave_out(str(error)))
            continue
        if not members and not file.explicit and not found.left_out:
            found.left_out.append(file.leave_out(ARCHIVE))
        found.files += members


def _is_archive(file: SourceFile) -> bool:
    if _is_remote(file) and split_suffixes(file.path)[2] != ZIP:
        return False
    with contextlib.closing(file.open()) as stream:
        return find_compression(stream.read(16)) == ZIP


def _is_remote(file: SourceFile) -> bool:
    return file.location.startswith("hf://")


def _list_members(file: SourceFile, found: FoundFiles) -> list[SourceFile]:
    """Return the files of text in an archive, by name; add what is left out to `found`.

    Raises:
        TextError: it holds none, is something else, or leaves an ambiguous choice.
    """
    with _open_archive(file) as archive:
        infos = {
            info.filename.replace("\\", "/"): info  # old programs write backslashes
            for info in archive.infolist()
            if not info.is_dir()
        }
    names = {name.casefold() for name in infos}
    if any(name in names for name in _OFFICE_MEMBERS):
        raise TextError(OFFICE)
    if any(name in names for name in _PROGRAM_MEMBERS):
        raise TextError("a program")
    reasons = reasons_by_path(infos)
    for name, info in infos.items():
        reasons[name] = reasons[name] or _member_reason(info)
    readable = sorted(name for name in infos if not reasons[name])
    if not readable:
        listed = ", ".join(f"{name} ({reason})" for name, reason in sorted(reasons.items())[:3])
        raise TextError(f"{ARCHIVE}: none of its {len(infos)} files is a text: {listed}")
    try:
        chosen, others = choose_split(readable)
        found.warnings += [f"{file.path}: {warning}" for warning in check_languages(chosen)]
    except TextError as error:
        raise TextError(f"{error}; unpack it to name them") from None
    others += [LeftOut(name, reason) for name, reason in sorted(reasons.items()) if reason]
    found.left_out += [LeftOut(f"{file.path}/{other.path}", other.reason) for other in others]
    return [
        SourceFile(
            f"{file.path}/{name}",
            partial(_open_member, file, infos[name].filename),
            size=infos[name].file_size,
            explicit=False,
            column=file.column,
        )
        for name in chosen
    ]


def _member_reason(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 1:
        return "encrypted"
    return "empty" if info.file_size == 0 else ""


def _open_archive(file: SourceFile) -> zipfile.ZipFile:
    """Open a zip archive; raise BadZipFile also for damage that zipfile has other errors for."""
    try:
        return zipfile.ZipFile(_open_seekable(file))
    except (ValueError, struct.error, OverflowError, IndexError) as error:
        raise zipfile.BadZipFile(str(error)) from None


def _open_seekable(file: SourceFile) -> Any:
    """Open an archive for random access; one that is inside of another is read into memory."""
    if file.location and not _is_remote(file):
        return Path(file.location).open("rb")
    stream = file.open()
    if hasattr(stream, "seek"):
        return stream
    return io.BytesIO(b"".join(iter(lambda: stream.read(1 << 20), b"")))


def _open_member(file: SourceFile, name: str) -> ByteStream:
    return cast(ByteStream, _open_archive(file).open(name))
