"""Find and open the files of a Hugging Face dataset.

`huggingface_hub` brings tokens, retries and caches, by its own variables: HF_ENDPOINT, HF_TOKEN,
HF_HOME. Its requests use proxies and certificates as all others do. `datasets` reads which files a
configuration has; where a dataset states none, `file_choice` chooses as for a folder.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from barnraise.errors import TextError, TextUnreachableError
from barnraise.protocol.http_client import open_http_client
from barnraise.text.connection_errors import is_busy, is_connection_error
from barnraise.text.download import ATTEMPTS, FIRST_PAUSE_SECONDS
from barnraise.text.extra import needs_extra
from barnraise.text.file_choice import LeftOut, check_languages, choose_split, reasons_by_path
from barnraise.text.folder_files import (
    FoundFiles,
    choose_configured_files,
    open_archives,
    states_configurations,
)
from barnraise.text.places import HubPlace
from barnraise.text.source_file import SourceFile

# Its own program for large files reads proxies and certificates by other rules. The variable counts
# when `huggingface_hub` is imported, which only functions do.
os.environ["HF_HUB_DISABLE_XET"] = "1"


def find_in_dataset(place: HubPlace) -> FoundFiles:
    """Find the files of a dataset's configuration and split, at one commit.

    `huggingface_hub` does not repeat each of the requests that fail because the hub is busy.

    Raises:
        TextError: the dataset cannot be reached, or the choice is ambiguous.
    """
    prepare_hub()
    with hub_errors(place.repository):
        for attempt in range(ATTEMPTS - 1):
            try:
                return _find_files(place)
            except Exception as error:  # see `hub_errors`
                if not is_busy(error):
                    raise
            time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        return _find_files(place)


def route_hub_requests() -> None:
    """Let `huggingface_hub` send its requests through our proxies, where it is installed.

    A version without these names reads the environment by itself.
    """
    try:
        from huggingface_hub.utils import _http as hub_http

        library: Any = getattr(hub_http, "httpx2", None) or vars(hub_http)["httpx"]
        hooks = {"request": [hub_http.hf_request_event_hook]}
        set_client_factory = hub_http.set_client_factory
    except (ImportError, LookupError, AttributeError):
        return
    options = {"event_hooks": hooks, "follow_redirects": True, "timeout": None}
    set_client_factory(lambda: open_http_client(library, **options))


def prepare_hub() -> None:
    """Prepare for downloads from the hub.

    Raises:
        TextError: no folder is known for its files; names the variable to set. `huggingface_hub`
            would use a folder called "~".
    """
    route_hub_requests()
    if any(os.environ.get(name) for name in ("HF_HOME", "XDG_CACHE_HOME")):
        return
    try:
        Path.home()
    except RuntimeError:
        raise TextError(
            "this user has no home folder: name a folder for downloads with the variable HF_HOME"
        ) from None


def _find_files(place: HubPlace) -> FoundFiles:
    with needs_extra("this machine cannot read Hugging Face datasets"):
        from huggingface_hub import HfApi, HfFileSystem

    system = HfFileSystem()
    info = HfApi().dataset_info(place.repository, revision=place.revision or None)
    commit = str(info.sha or place.revision or "main")
    root = f"datasets/{place.repository}@{commit}"
    names_file = bool(place.config) and system.isfile(f"{root}/{place.config}")
    if not names_file and _states_configurations(place.repository, commit):
        paths = choose_configured_files(
            place.repository, f"hf:{place.repository}", place.config, place.split, commit
        )
        names = sorted(path.partition(f"@{commit}/")[2] for path in paths)
        found = FoundFiles()
    else:
        found, names = _choose_files(place, system, root)
    for name, reason in reasons_by_path(names).items():
        if reason:
            found.left_out.append(LeftOut(f"hf:{place.repository}/{name}", reason))
            names.remove(name)
    if not names:
        kinds = sorted({Path(left_out.path).suffix for left_out in found.left_out} - {""})
        raise TextError(
            f"hf:{place.repository} holds no text that this version reads; "
            f"it holds {', '.join(kinds[:20]) or 'nothing'}"
        )
    found.files = [_describe(system, place, root, name) for name in names]
    open_archives(found)
    return found


def _states_configurations(repository: str, commit: str) -> bool:
    """Return whether the dataset's card lists its configurations."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        card = hf_hub_download(repository, "README.md", repo_type="dataset", revision=commit)
    except EntryNotFoundError as error:
        if isinstance(error, FileNotFoundError):  # it is not here, and the hub could not be asked
            raise
        return False
    return states_configurations(Path(card))


def _choose_files(place: HubPlace, system: Any, root: str) -> tuple[FoundFiles, list[str]]:
    """Choose the files of a dataset that states no configurations."""
    found = FoundFiles()
    shown = f"hf:{place.repository}"
    everything = sorted(str(path).removeprefix(f"{root}/") for path in system.find(root))
    folder = f"{place.config}/" if place.config else ""
    names = [name for name in everything if name.startswith(folder) or name == place.config]
    if not names:
        folders = sorted({name.rpartition("/")[0] for name in everything} - {""})
        choices = ", ".join(folders[:50]) or "none"
        raise TextError(f"{shown} has no file or folder '{place.config}'; it has {choices}")
    reasons = reasons_by_path(names)
    readable = [name for name in names if not reasons[name]]
    found.left_out = [
        LeftOut(f"{shown}/{name}", reason) for name, reason in reasons.items() if reason
    ]
    try:
        chosen, others = choose_split(readable, place.split)
        found.warnings += [f"{shown}: {warning}" for warning in check_languages(chosen)]
        _check_folders(chosen, len(folder))
    except TextError as error:
        raise TextError(f"{shown}: {error}") from None
    found.left_out += [LeftOut(f"{shown}/{other.path}", other.reason) for other in others]
    return found, chosen


def _check_folders(names: list[str], skip: int) -> None:
    """Refuse tables in several folders: they are several texts, or one text several times."""
    folders = sorted({name[skip:].rpartition("/")[0] for name in names})
    tops = sorted({folder.partition("/")[0] for folder in folders})
    if len(tops) > 1 and all(name.casefold().endswith(".parquet") for name in names):
        shown = ", ".join(top or "its top" for top in tops[:20])
        raise TextError(f"it holds several texts: name one as owner/name/FOLDER, of {shown}")


def _describe(system: Any, place: HubPlace, root: str, name: str) -> SourceFile:
    path = f"{root}/{name}"
    size = int(system.info(path).get("size") or 0)
    return SourceFile(
        f"hf:{place.repository}/{name}",
        partial(_RemoteFile, system, path, f"{place.repository}/{name}"),
        f"hf://{path}",
        size,
        explicit=False,
        column=place.column,
    )


class _RemoteFile:
    """Read a file of the hub; what its libraries raise meanwhile is one sentence."""

    def __init__(self, system: Any, path: str, shown: str) -> None:
        self._shown = shown
        with hub_errors(shown):
            self._file = system.open(path, "rb")

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes, or all; b"" at the end."""
        with hub_errors(self._shown):
            return self._file.read(size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# What the hub's libraries raise, by the names of the errors and of their bases, and what to do.
_SENTENCES = {
    "GatedRepoError": "is gated: accept its terms on its page, and set HF_TOKEN to your token",
    "RepositoryNotFoundError": "does not exist, or HF_TOKEN has no access to it",
    "DatasetNotFoundError": "does not exist, or HF_TOKEN has no access to it",
    "RevisionNotFoundError": "has no such revision",
    "OfflineModeIsEnabled": "cannot be reached: HF_HUB_OFFLINE is set",
}


@contextmanager
def hub_errors(shown: str) -> Iterator[None]:
    """Turn what the hub's libraries raise into one sentence."""
    try:
        yield
    except TextError:
        raise
    except Exception as error:  # the libraries raise their own, httpx's and the system's errors
        for kind in type(error).__mro__:
            if kind.__name__ in _SENTENCES:
                raise TextError(f"hf:{shown} {_SENTENCES[kind.__name__]}") from None
        if _is_token_unusable():
            raise TextError(
                f"hf:{shown} cannot be read: the token in HF_TOKEN has characters that no token "
                "has: copy it again"
            ) from None
        # That a file is not in the cache says less than why the hub could not be asked.
        origin = error.__cause__ if isinstance(error, FileNotFoundError) else None
        first = next(
            (line.strip() for line in str(origin or error).splitlines() if line.strip()), ""
        )
        kind = TextUnreachableError if is_connection_error(error) else TextError
        raise kind(f"hf:{shown} cannot be read: {first[:300] or type(error).__name__}") from None


def _is_token_unusable() -> bool:
    """Return whether the hub's token cannot be sent: it was pasted with quotes or other letters."""
    from huggingface_hub import get_token

    token = get_token() or ""
    return not all("!" <= character <= "~" and character not in "\"'" for character in token)
