"""What `barnraise service install` was asked for, in the state directory."""

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.state_dir import StateDir

SERVICE_FILE = "service.json"  # in the state directory


class ServiceRecord(BaseModel):
    """What the service trains.

    Attributes:
        name: of the service at the system's service manager.
        runs: to train, by id.
        share: of the time of several runs, as typed.
        follow_next: whether the site's next open run follows.
        is_system: whether it is a service of the system, and not of its user.
        options: of the worker, by name, where they differ from the usual ones.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    runs: list[str] = []
    share: str = ""
    follow_next: bool = False
    is_system: bool = False
    options: dict[str, Any] = {}

    @classmethod
    def load(cls, folder: Path) -> "ServiceRecord | None":
        """Load the record from a state directory; None if no service is installed.

        Raises:
            StateError: the file is damaged.
        """
        path = folder / SERVICE_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            raise StateError(
                f"{path} is damaged: remove it, and install the service again"
            ) from None

    def save(self, folder: Path) -> None:
        """Store the record."""
        write_atomically(folder / SERVICE_FILE, self.model_dump_json(indent=1).encode())


def choose_service_name(folder: Path) -> str:
    """Return the service's name for a state directory: each may have a service of its own."""
    if folder.resolve() == (Path.home() / StateDir.DEFAULT_NAME).resolve():
        return "barnraise"
    return f"barnraise-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
