"""Push an exported model to a repository of its owner's on the Hugging Face hub.

`huggingface_hub` brings the token, large files and retries, by its own variables: HF_TOKEN,
HF_ENDPOINT, HF_HOME. Its requests use proxies and certificates as all others do.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barnraise.errors import StateError
from barnraise.text.hub_files import route_hub_requests

NAME = r"[^\W_][\w.-]{0,95}"  # the hub's own check refuses the rest
REPOSITORY = re.compile(f"{NAME}/{NAME}", re.ASCII)
INSTALL_ADVICE = "install it with `pip install huggingface_hub`"
MAX_REASON = 200  # characters of an error's first line


@dataclass(frozen=True)
class HubRepository:
    """A model repository that its owner's token may write to."""

    name: str  # as "owner/name"
    is_private: bool  # whether only its owner sees it, if it does not exist yet

    @classmethod
    def choose(cls, name: str, is_private: bool) -> "HubRepository":
        """Check a repository's name and that there is a token, before anything takes time.

        Raises:
            StateError: the name is not like owner/name, there is no token, or `huggingface_hub` is
                not installed.
        """
        if not REPOSITORY.fullmatch(name):
            raise StateError(f"'{name}' is not a repository; write it as owner/name")
        if not _import_hub().get_token():
            raise StateError(
                "pushing needs a Hugging Face token that may write: put it into the variable "
                "HF_TOKEN, or log in with `hf auth login`"
            )
        return cls(name, is_private)

    def push(self, folder: Path, message: str) -> str:
        """Create the repository if there is none, and commit the folder's files, all or none.

        Other files in the repository stay.

        Returns:
            The repository's address.

        Raises:
            StateError: the hub refused or does not answer; with what to do.
        """
        library = _import_hub()
        api = library.HfApi()
        try:
            created = api.create_repo(
                self.name, private=self.is_private or None, exist_ok=True, repo_type="model"
            )
            api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message=message,
                ignore_patterns=[".*"],
            )
        # The library raises its own errors, httpx' and those of its transfer of large files.
        except Exception as error:
            raise StateError(f"{self.name} was not pushed: {_explain(error)}") from error
        return str(created)


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise StateError(f"pushing needs huggingface_hub: {INSTALL_ADVICE}") from None
    route_hub_requests()
    return huggingface_hub


def _explain(error: Exception) -> str:
    """Return what an error means for a person."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status == 401:
        return "the hub does not accept the token in HF_TOKEN: create one under Settings → Tokens"
    if status in (403, 404):
        return "your token may not write there: it needs the right to write, and the owner's name"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_REASON]
    if status:
        return f"the hub answered {status} ({reason}); try again later"
    return f"{reason}; the same command tries again"
