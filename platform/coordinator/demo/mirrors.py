"""Several mirrors on one machine: each a folder, servers and processes of its own, and one signed list of all."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings

from barnraise.protocol.mirror_list import (
    MirrorEntry,
    MirrorList,
    SignedMirrorList,
    add_signature,
    unsigned_list,
)
from barnraise.protocol.signing import Identity
from coordinator.demo import servers
from coordinator.demo.processes import ProcessGroup

ROOT = "root.key"  # of the list; a demo's lies on the same disk, a real one's never does
SECONDS = 180 * 86_400.0  # that a list counts
TELLS = "10"  # seconds between two tellings of credit and checkpoints
SITE, CELERY, SERVERS, RAISING = "site", "celery", "servers", "raise"  # a mirror's processes
_http = httpx.Client(
    verify=False, trust_env=False
)  # plain HTTP on one machine, asked ten times a second


class DemoMirror:
    """One of them. `through`: what its commands are run by, such as a network namespace. Nothing runs before it is
    started; what is started is ended by `stop`, or, where this process was killed, by the next one's first word."""

    def __init__(
        self,
        folder: Path,
        name: str,
        port: int,
        *,
        host: str = "127.0.0.1",
        through: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.host, self.port, self.through = (
            folder,
            name,
            host,
            port,
            tuple(through),
        )
        self.url = f"http://{host}:{port}"
        self.key = Identity.load_or_create(folder / "mirror.key").key
        self.processes = ProcessGroup(folder / "logs")
        self.environment = {
            "BARNRAISE_STATE": str(folder),
            "BARNRAISE_NAME": name,
            "BARNRAISE_HOSTS": f"localhost,127.0.0.1,{host}",
            "BARNRAISE_URL": self.url,
            "BARNRAISE_TELL_SECONDS": TELLS,
            "DJANGO_SETTINGS_MODULE": "coordinator.settings",
        }

    @property
    def list_entry(self) -> MirrorEntry:
        return MirrorEntry(key=self.key, url=self.url, name=self.name, admitted=time.time())

    # ---- its processes

    def run(self, name: str, *command: str | Path, **environment: str):
        """Python with these arguments, as a process of this mirror."""
        told = {**self.environment, **environment}
        return self.processes.start(name, *self.through, sys.executable, *command, **told)

    def start_servers(self) -> None:
        (self.folder / servers.URLS).unlink(missing_ok=True)
        self.environment |= {"DATABASE_URL": "", "REDIS_URL": ""}  # not those of whoever started us
        self.run(SERVERS, "-m", "coordinator.demo.servers", self.folder)

    def find_servers(self) -> bool:
        """Whether they answer; from then on its processes know where."""
        if found := servers.read_urls(self.folder):
            self.environment |= found
        return found is not None

    def start_setup(self, *how: str) -> None:
        """Its tables, and what it begins with: `manage.py raise_mirror`, which needs no servers to be up yet."""
        self.run(RAISING, settings.ROOT / "manage.py", "raise_mirror", *how)

    def is_set_up(self) -> bool:
        if self.processes.children[RAISING].poll() != 0 or not self.find_servers():
            return False
        del self.processes.children[RAISING]
        return True

    def start(self, **environment: str) -> None:
        """What serves and what works."""
        self.start_web(**environment)
        self.start_celery(**environment)

    def start_web(self, **environment: str) -> None:
        serve = (
            "-m",
            "uvicorn",
            "coordinator.asgi:application",
            "--host",
            self.host,
            "--port",
            str(self.port),
        )
        self.run(SITE, *serve, "--no-access-log", "--timeout-graceful-shutdown", "3", **environment)

    def start_celery(self, **environment: str) -> None:
        """One process that works, and its child that beats: of nine that three mirrors would have that saves three."""
        work = ("-m", "celery", "-A", "coordinator.celery:app", "worker", "--beat", "-P", "solo")
        self.run(CELERY, *work, "--loglevel", "WARNING", **environment)

    def kill(self) -> None:
        """As a power cut would, but for its servers."""
        for name in (SITE, CELERY):
            if name in self.processes.children:
                self.processes.kill(name)

    def stop(self) -> None:
        """Its databases last."""
        self.processes.stop(*[name for name in self.processes.children if name != SERVERS])
        self.processes.stop()

    @property
    def is_running(self) -> bool:
        """Whether both processes were started, and neither has ended."""
        found = [self.processes.children.get(name) for name in (SITE, CELERY)]
        return all(child is not None and child.poll() is None for child in found)

    @property
    def pids(self) -> list[int]:
        return [
            self.processes.children[name].pid
            for name in (SITE, CELERY)
            if name in self.processes.children
        ]

    # ---- what it says

    def fetch_status(self, seconds: float = 2.0) -> dict[str, Any] | None:
        """What it says of its logs and of the other mirrors; None where it does not answer."""
        try:
            answer = _http.get(f"{self.url}/status", timeout=seconds)
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None


def common_state_hash(mirrors: Sequence[DemoMirror]) -> str | None:
    """The state hash that all of these publish; None where one does not answer, or they differ."""
    told = [mirror.fetch_status() for mirror in mirrors]
    hashes = {each["state"] if each else None for each in told}
    return hashes.pop() if len(hashes) == 1 else None


def build_mirror_list(
    folder: Path, mirrors: Sequence[DemoMirror], before: MirrorList | None = None
) -> SignedMirrorList | None:
    """The list that names these mirrors where they are now, signed by the one root whose key is kept in `folder`; None
    where `before` says so already. What `before` names besides stays in it: a list drops no mirror."""
    root = Identity.load_or_create(folder / ROOT)
    known = {each.key: each for each in before.mirrors} if before else {}
    named = {
        each.key: known.get(each.key, each.list_entry).model_copy(update={"url": each.url})
        for each in mirrors
    }
    if before and known == named and before.expires > time.time() + SECONDS / 2:
        return None
    found = MirrorList(
        version=before.version + 1 if before else 1,
        expires=time.time() + SECONDS,
        threshold=1,
        roots=[root.key],
        mirrors=list({**known, **named}.values()),
    )
    return add_signature(root, unsigned_list(found))
