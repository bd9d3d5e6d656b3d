"""Read and write a worker's state on disk: one directory per machine, one folder in it per run.

key                     the machine's Ed25519 key
coordinator.json        the coordinator where the machine is enrolled, and its id there
limits.json             how much of the machine a worker may use
hardware.json           the measured speeds and sizes of the machine
runs/<run>/folder.json  the owner of this folder: format, run, spec digest, incarnation
runs/<run>/…            spec.json, join.json, ledger, blobs, checkpoints, spool, status.json
"""

import dataclasses
import json
import logging
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.protocol.signing import Identity
from barnraise.protocol.types import Id, Message, PublicKey

log = logging.getLogger("barnraise")

FORMAT = 1  # version of the layout of a run's folder
LIMITS_FILE = "limits.json"
JOIN_REPLY_FILE = "join.json"  # in a run's folder: the site's last answer that let this machine in


class SiteMembership(Message):
    """Record a machine's enrolment as the coordinator confirmed it."""

    url: str
    mirror: MirrorView
    machine: Id
    person: str = ""


class RunLabel(Message):
    """Identify the owner of a run's folder.

    `spec` is the spec's digest; it is empty until the run is launched.
    """

    format: int
    run: Id
    key: PublicKey
    spec: str = ""
    incarnation: str


class StateDir:
    """Give access to a machine's state directory; creates its key on first use.

    Raises:
        StateError: the key in the directory is damaged.
    """

    DEFAULT_NAME = ".barnraise"  # in a person's home folder

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.identity = Identity.load_or_create(path / "key")
        except ValueError:
            raise StateError(
                f"{path / 'key'} is damaged: remove it and run `barnraise login URL` again"
            ) from None
        except OSError as error:
            raise _build_folder_error(path, error) from None

    @classmethod
    def choose_path(cls, named: Path | None) -> Path:
        """Return the folder that was named, with its `~` expanded, or `~/.barnraise`.

        No shell expands `~` in a service's environment, nor behind `--home=`.

        Raises:
            StateError: `~` has no meaning: a container's user often has no home folder.
        """
        try:
            return (named or Path("~") / cls.DEFAULT_NAME).expanduser()
        except RuntimeError:
            raise StateError(
                "there is no such home folder: name a folder for this machine's state with "
                "--home FOLDER or the variable BARNRAISE_HOME"
            ) from None

    @property
    def membership(self) -> SiteMembership:
        """Read the machine's enrolment.

        Raises:
            StateError: the machine is not enrolled, or the file is damaged.
        """
        path = self.path / "coordinator.json"
        try:
            return SiteMembership.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise StateError(
                "this machine is not enrolled yet: run `barnraise login URL` first, or name the "
                "run by its address in the browser"
            ) from None
        except ValidationError:
            raise StateError(f"{path} is damaged: run `barnraise login URL` again") from None

    @property
    def is_enrolled(self) -> bool:
        """Return whether this machine is enrolled at a site."""
        return (self.path / "coordinator.json").exists()

    def remove_membership(self) -> None:
        """Forget the machine's enrolment and the site's mirrors."""
        for name in ("coordinator.json", "mirrors.json"):
            (self.path / name).unlink(missing_ok=True)

    def save_membership(self, membership: SiteMembership) -> None:
        """Replace the machine's enrolment."""
        write_atomically(
            self.path / "coordinator.json", membership.model_dump_json(indent=1).encode()
        )

    @property
    def limits(self) -> Limits:
        """Read the saved limits; without a file nothing is limited.

        Raises:
            StateError: the file is damaged, of another user or of a newer version, or holds an
                invalid limit. The message names the file.
        """
        path = self.path / LIMITS_FILE
        if not path.exists():
            return Limits()
        _check_owner(path)
        try:
            fields = json.loads(path.read_bytes())
            fields.pop("compiled", None)  # a limit of earlier versions
            unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(Limits)})
            if not unknown:
                return Limits(**fields)
        except (ValueError, TypeError, AttributeError):  # also a value of another type
            raise StateError(
                f"{path} is damaged or cut short: remove it and set the limits again"
            ) from None
        except StateError as error:
            raise StateError(f"{path}: {error}. Remove it and set the limits again") from None
        raise StateError(
            f"{path} has the limit '{unknown[0]}', which only a newer version of barnraise "
            "knows: update barnraise, or remove the file and set the limits again"
        )

    @limits.setter
    def limits(self, limits: Limits) -> None:
        write_atomically(self.path / LIMITS_FILE, json.dumps(asdict(limits), indent=1).encode())

    def run_folders(self) -> list[Path]:
        """List the folders of the runs that this machine has worked on."""
        return sorted(p.parent for p in (self.path / "runs").glob("*/folder.json"))

    def open_run(self, run: str) -> "RunDir":
        """Open and lock the folder of a run; see `RunDir`."""
        try:
            return RunDir(self.path / "runs" / run, run, self.identity.key)
        except OSError as error:
            raise _build_folder_error(self.path, error) from None


def _check_owner(path: Path) -> None:
    """Raise StateError if a file is of another user, who could decide when this one trains."""
    if hasattr(os, "geteuid") and (owner := path.stat().st_uid) != os.geteuid():
        raise StateError(
            f"{path} belongs to another user (number {owner}, and this one is {os.geteuid()}): "
            "remove it and set the limits again"
        )


def _build_folder_error(path: Path, error: OSError) -> StateError:
    """Return an error about a folder that cannot be written: read-only, or of another user."""
    return StateError(
        f"nothing can be written to {path} ({error.strerror or error}): name another folder for "
        "this machine's state with --home FOLDER or the variable BARNRAISE_HOME"
    )


class RunDir:
    """Hold one run's state on this machine, locked while a worker uses it.

    The folder is created if it is missing. It must belong to the run with this id, and to the
    machine with this public key.

    Raises:
        StateError: another worker uses the folder, it is damaged, or it belongs to another run,
            another machine or another version of the layout. The message names the difference.
    """

    def __init__(self, path: Path, run: str, key: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        # Not local to a thread: the folder may be closed by another thread than the one that
        # opened it.
        self._lock = FileLock(path / "lock", thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise StateError(f"{path} is in use by another worker on this machine") from None
        try:
            self.label = self._load_label(run, key)
        except StateError:
            self._lock.release()
            raise

    def _load_label(self, run: str, key: str) -> RunLabel:
        path = self.path / "folder.json"
        if not path.exists():
            # A crash while the folder was created leaves "folder.json.new".
            own_names = ("lock", "folder.json.new")
            foreign = sorted(p.name for p in self.path.iterdir() if p.name not in own_names)
            if foreign:
                raise StateError(
                    f"{self.path} has no folder.json, yet holds {', '.join(foreign[:5])}: "
                    "not a run's folder"
                )
            label = RunLabel(format=FORMAT, run=run, key=key, incarnation=secrets.token_hex(8))
            write_atomically(path, label.model_dump_json(indent=1).encode())
            return label
        try:
            raw = json.loads(path.read_bytes())
            if isinstance(raw, dict) and raw.get("format") != FORMAT:
                raise StateError(
                    f"{self.path} is of format {raw.get('format')}; "
                    f"this version works with {FORMAT}"
                )
            label = RunLabel.model_validate(raw)
        except ValueError as error:
            raise StateError(f"{path} is damaged: {error}") from None
        if label.run != run:
            raise StateError(f"{self.path} holds the state of run {label.run}, not of run {run}")
        if label.key != key:
            raise StateError(
                f"{self.path} belongs to the machine {label.key[:8]}, and this one is {key[:8]}"
            )
        return label

    def pin_spec(self, spec: str) -> None:
        """Tie the folder to the launched spec with this digest.

        Raises:
            StateError: the folder is already tied to another spec.
        """
        if self.label.spec and self.label.spec != spec:
            raise StateError(
                f"{self.path} was trained under spec {self.label.spec[:8]}, "
                f"and the run has {spec[:8]} now"
            )
        self._update_label(spec=spec)

    def renew_incarnation(self) -> str:
        """Start a new incarnation and return its id.

        This is necessary when a peer holds updates of this machine that the folder has lost.
        """
        self._update_label(incarnation=secrets.token_hex(8))
        return self.label.incarnation

    def _update_label(self, **changed: str) -> None:
        self.label = self.label.model_copy(update=changed)
        write_atomically(self.path / "folder.json", self.label.model_dump_json(indent=1).encode())

    def save_message(self, name: str, message: Message) -> None:
        """Write a message as JSON to the file `name` in the folder, durably."""
        write_atomically(self.path / name, message.model_dump_json(indent=1).encode())

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace the file that `barnraise status` reads.

        The file is replaced whole. It is not part of the state, so it is not flushed to the disk,
        and an error (a full disk, or on Windows a reader) is logged and does not stop training.
        """
        fresh = self.path / "status.json.new"
        try:
            fresh.write_text(json.dumps(status))
            fresh.replace(self.path / "status.json")
        except OSError as error:
            log.debug("status.json was not written: %s", error)

    @property
    def is_open(self) -> bool:
        """Return whether this process has the folder locked."""
        return self._lock.is_locked

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()
