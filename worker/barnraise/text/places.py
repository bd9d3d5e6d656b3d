"""Name the places where a text is: files, folders, addresses, datasets of a hub. Pure."""

import re
from dataclasses import dataclass
from pathlib import Path

from barnraise.errors import TextError
from barnraise.spec import DATASET, split_address

HUB_PREFIXES = ("hf://datasets/", "hf:")
_HUB_PAGE = re.compile(
    r"https?://huggingface\.co/datasets/([\w.-]+/[\w.-]+)/?(?:viewer.*|tree/.*)?$"
)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)


@dataclass(frozen=True)
class PathPlace:
    """A file or folder of this machine, and the column to read."""

    path: Path
    column: str = ""


@dataclass(frozen=True)
class AddressPlace:
    """An address of a file, and the column to read."""

    url: str
    column: str = ""


@dataclass(frozen=True)
class HubPlace:
    """A dataset of a hub, spelled owner/name/config:split@revision#column.

    Attributes:
        repository: owner/name.
        config: its configuration, or a folder or file of it; "" for the dataset's default.
        split: "" for the training part.
        revision: a branch, tag or commit; "" for the default branch.
        column: "" to choose it.
    """

    repository: str
    config: str = ""
    split: str = ""
    revision: str = ""
    column: str = ""


Place = PathPlace | AddressPlace | HubPlace


def parse_place(text: str) -> Place:
    """Parse what a person types: a path, an address, or hf:owner/name; each may end in #column.

    Raises:
        TextError: it is none of them.
    """
    if not text.strip():  # an empty path would be the current folder
        raise TextError("a source is empty: name a file, a folder, an address or hf:owner/name")
    for prefix in HUB_PREFIXES:
        if text.startswith(prefix):
            return parse_dataset(text.removeprefix(prefix))
    if text.lower().startswith(("http://", "https://")):
        url, _, column = text.partition("#")
        if page := _HUB_PAGE.match(url):
            raise TextError(f"{url} is a page about a dataset: name it as hf:{page[1]}")
        try:
            is_address = bool(split_address(url).hostname)
        except ValueError:
            is_address = False
        if not is_address:
            raise TextError(f"{url} is not an address")
        return AddressPlace(url, column)
    if _ADDRESS.match(text):
        scheme = text.partition(":")[0]
        raise TextError(f"{text}: addresses begin with https:// or http://, not {scheme}://")
    path = Path(text)
    before, sharp, column = text.rpartition("#")
    if sharp and before and not _path_exists(path):
        return PathPlace(Path(before), column)
    return PathPlace(path)


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long, or a folder may not be read
        return False


def parse_dataset(text: str) -> HubPlace:
    """Parse owner/name/config:split@revision#column; the last four are optional.

    Raises:
        TextError: it is not spelled so.
    """
    if not DATASET.fullmatch(text):
        raise TextError(
            f"'{text[:60]}' is not a dataset: name it as owner/name, where need be with /config, "
            ":split, @revision or #column after it"
        )
    rest, _, column = text.partition("#")
    rest, _, revision = rest.partition("@")
    rest, _, split = rest.partition(":")
    owner, name, *config = rest.split("/")
    return HubPlace(f"{owner}/{name}", "/".join(config), split, revision, column)
