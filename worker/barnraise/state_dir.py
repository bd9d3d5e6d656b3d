"""Where a worker keeps what is its own: one home for the machine, one folder for each run it works on.

home/key                     the machine's Ed25519 key
home/coordinator.json        which coordinator knows it, and as what
home/limits.json             how much of it a worker may use
home/hardware.json           what it can do, as measured
home/runs/<run>/folder.json  whose state this is: format, run, spec digest, incarnation
home/runs/<run>/…            spec.json, join.json, ledger, blobs, checkpoints, spool, status.json
"""

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

FORMAT = 1  # of a run's folder


class SiteMembership(Message):
    """What a coordinator told this machine when it was enrolled."""

    url: str
    mirror: MirrorView
    machine: Id
    person: str = ""


class RunLabel(Message):
    """What a run's folder says it is. `spec` is the spec's digest, empty until the run is launched."""

    format: int
    run: Id
    key: PublicKey
    spec: str = ""
    incarnation: str


class StateDir:
    def __init__(self, path: Path):
        """Raises StateError when the key in it is damaged."""
        self.path = path
        try:
            self.identity = Identity.load_or_create(path / "key")
        except ValueError:
            raise StateError(
                f"{path / 'key'} is damaged: remove it and run `barnraise login URL` again"
            ) from None

    @classmethod
    def default_path(cls) -> Path:
        return Path(os.environ.get("BARNRAISE_HOME") or Path.home() / ".barnraise")

    @property
    def membership(self) -> SiteMembership:
        path = self.path / "coordinator.json"
        try:
            return SiteMembership.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise StateError(
                "this machine is not enrolled yet: run `barnraise login URL` first"
            ) from None
        except ValidationError:
            raise StateError(f"{path} is damaged: run `barnraise login URL` again") from None

    def save_membership(self, membership: SiteMembership) -> None:
        write_atomically(
            self.path / "coordinator.json", membership.model_dump_json(indent=1).encode()
        )

    @property
    def limits(self) -> Limits:
        """What was last said; nothing said, nothing limited. Raises StateError when the file is damaged."""
        path = self.path / "limits.json"
        if not path.exists():
            return Limits()
        try:
            return Limits(**json.loads(path.read_bytes()))
        except (ValueError, TypeError):
            raise StateError(f"{path} is damaged: remove it, and say the limits again") from None

    @limits.setter
    def limits(self, limits: Limits) -> None:
        write_atomically(self.path / "limits.json", json.dumps(asdict(limits), indent=1).encode())

    def run_folders(self) -> list[Path]:
        """Folders of the runs this machine has worked on."""
        return sorted(p.parent for p in (self.path / "runs").glob("*/folder.json"))

    def open_run(self, run: str) -> "RunDir":
        return RunDir(self.path / "runs" / run, run, self.identity.key)


class RunDir:
    """One run's state on this machine, locked while a worker uses it. Another run's or version's is refused by name."""

    def __init__(self, path: Path, run: str, key: str):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(
            path / "lock", thread_local=False
        )  # whichever thread closes the folder frees it
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
            ours = ("lock", "folder.json.new")  # the latter: cut off while it was made
            if foreign := sorted(p.name for p in self.path.iterdir() if p.name not in ours):
                raise StateError(
                    f"{self.path} has no folder.json, yet holds {', '.join(foreign[:5])}: not a run's folder"
                )
            label = RunLabel(format=FORMAT, run=run, key=key, incarnation=secrets.token_hex(8))
            write_atomically(path, label.model_dump_json(indent=1).encode())
            return label
        try:
            raw = json.loads(path.read_bytes())
            if isinstance(raw, dict) and raw.get("format") != FORMAT:
                raise StateError(
                    f"{self.path} is of format {raw.get('format')}; this version works with {FORMAT}"
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
        """Ties the folder to the launched spec of this digest. Raises StateError if it was another's."""
        if self.label.spec and self.label.spec != spec:
            raise StateError(
                f"{self.path} was trained under spec {self.label.spec[:8]}, and the run has {spec[:8]} now"
            )
        self._update_label(spec=spec)

    def renew_incarnation(self) -> str:
        """A new life: somebody knows updates of mine that this folder has lost."""
        self._update_label(incarnation=secrets.token_hex(8))
        return self.label.incarnation

    def _update_label(self, **changed: str) -> None:
        self.label = self.label.model_copy(update=changed)
        write_atomically(self.path / "folder.json", self.label.model_dump_json(indent=1).encode())

    def save_message(self, name: str, message: Message) -> None:
        write_atomically(self.path / name, message.model_dump_json(indent=1).encode())

    def write_status(self, status: dict[str, Any]) -> None:
        """Write the file that `barnraise status` reads: replaced whole, never half-written; no state, so not fsynced, and
        a disk that refuses it (full, or on Windows while somebody reads) stops nobody."""
        fresh = self.path / "status.json.new"
        try:
            fresh.write_text(json.dumps(status))
            fresh.replace(self.path / "status.json")
        except OSError as error:
            log.debug("status.json was not written: %s", error)

    def close(self) -> None:
        self._lock.release()
