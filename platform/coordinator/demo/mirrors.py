"""Run several mirrors on one machine, each with its own folder, servers and processes."""

import subprocess
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
from coordinator.demo.commands import beat_command, web_command, worker_command
from coordinator.demo.processes import ChildCommand
from coordinator.demo.supervisor import Supervisor
from coordinator.lib.embedded.claims import is_supervised
from coordinator.lib.task_queues import TASK_QUEUE, WEBHOOK_QUEUE

ROOT_KEY = "root.key"  # of the mirror list; a real one never lies on a site's disk
LIST_SECONDS = 180 * 86_400.0  # until a list expires
CREDIT_SECONDS = "10"  # between two events about credit and checkpoints
# Longer than the 60 s that pg_ctl gives Postgres: a killed server process leaves Postgres running.
SERVERS_STOP_SECONDS = 75.0
CLAIM_SECONDS = 120.0  # until the process of the servers must have the state folder
# Names of a mirror's processes.
SITE = "site"
CELERY = "celery"
BEAT = "beat"
PARTS = (SITE, CELERY, BEAT)  # all but the servers
SERVERS = "servers"
RAISING = "raise"
# Plain HTTP on one machine, ten requests a second.
_http = httpx.Client(verify=False, trust_env=False)


class DemoMirror:
    """Run one mirror.

    Nothing runs before it is started. Its web server, its Celery and its servers are started again
    when they end, unless `kill` or `stop` has ended them.

    Args:
        folder: Its state folder.
        through: Command that runs its commands, such as a network namespace.
    """

    servers_options: tuple[str, ...] = ()  # of `coordinator.demo.servers`

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
        self.folder = folder
        self.name = name
        self.host = host
        self.port = port
        self.through = tuple(through)
        self.url = f"http://{host}:{port}"
        self.key = Identity.load_or_create(folder / "mirror.key").key
        self.processes = Supervisor(folder / "logs")
        self.environment = {
            "BARNRAISE_STATE": str(folder),
            "BARNRAISE_NAME": name,
            "BARNRAISE_HOSTS": f"localhost,127.0.0.1,{host}",
            "BARNRAISE_URL": self.url,
            "BARNRAISE_CREDIT_SECONDS": CREDIT_SECONDS,
            "DJANGO_SETTINGS_MODULE": "coordinator.settings",
        }

    @property
    def list_entry(self) -> MirrorEntry:
        """Return its entry in a mirror list."""
        return MirrorEntry(key=self.key, url=self.url, name=self.name, admitted=time.time())

    # ---- its processes

    def run(self, name: str, *command: str | Path, **environment: str) -> subprocess.Popen:
        """Run Python with these arguments as a process of this mirror."""
        child = self._build_command(*command, **environment)
        return self.processes.start_child(name, child)

    def supervise(self, name: str, *command: str | Path, **environment: str) -> None:
        """Run Python with these arguments as a process that is started again when it ends."""
        self.processes.supervise(name, self._build_command(*command, **environment))

    def _build_command(self, *command: str | Path, **environment: str) -> ChildCommand:
        arguments = (*self.through, sys.executable, *map(str, command))
        return ChildCommand(arguments, {**self.environment, **environment})

    def start_servers(self) -> None:
        """Start its Postgres and Valkey."""
        (self.folder / servers.URLS).unlink(missing_ok=True)
        self.environment |= {"DATABASE_URL": "", "REDIS_URL": ""}
        options = self.servers_options
        self.supervise(SERVERS, "-m", "coordinator.demo.servers", self.folder, *options)

    def has_servers_of_its_own(self) -> bool:
        """Return whether a process has the state folder, in which others start no servers then."""
        return servers.read_urls(self.folder) is not None or is_supervised(self.folder)

    def find_servers(self) -> bool:
        """Return whether its servers answer; if so, pass their URLs to its processes."""
        if urls := servers.read_urls(self.folder):
            self.environment |= urls
        return urls is not None

    def start_setup(self, *how: str) -> None:
        """Start `manage.py raise_mirror`, which creates its tables and its first data.

        The servers need not answer yet. But their process must have the state folder by then, or
        the new one would start servers too, which the first one would stop.

        Raises:
            RuntimeError: The process of the servers fails, or does not start.
        """
        deadline = time.monotonic() + CLAIM_SECONDS
        while not self.has_servers_of_its_own():
            if self.processes.failure or time.monotonic() > deadline:
                tail = self.processes.log_tail(SERVERS)
                raise RuntimeError(
                    self.processes.failure
                    or f"the servers of {self.name} did not start. The end of their log:\n{tail}"
                )
            time.sleep(0.1)
        self.run(RAISING, settings.ROOT / "manage.py", "raise_mirror", *how)

    def is_set_up(self) -> bool:
        """Return whether `raise_mirror` has ended and the servers answer."""
        if self.processes.children[RAISING].poll() != 0 or not self.find_servers():
            return False
        del self.processes.children[RAISING]
        return True

    def start(self, **environment: str) -> None:
        """Start its web server and its Celery."""
        self.start_web(**environment)
        self.start_celery(**environment)

    def start_web(self, **environment: str) -> None:
        """Start its web server."""
        _, *serve = web_command(self.port, self.host)
        self.supervise(SITE, *serve, "--timeout-graceful-shutdown", "3", **environment)

    def start_celery(self, **environment: str) -> None:
        """Start Celery as one worker of all queues, and its scheduler."""
        _, *work = worker_command(TASK_QUEUE, WEBHOOK_QUEUE)
        self.supervise(CELERY, *work, **environment)
        _, *schedule = beat_command()
        self.supervise(BEAT, *schedule, **environment)

    def kill(self) -> None:
        """Kill its processes, except for the servers, as a power cut would."""
        for name in PARTS:
            if name in self.processes.children:
                self.processes.kill(name)

    def stop(self) -> None:
        """Stop its processes, the servers last."""
        self.processes.stop(*[name for name in self.processes.children if name != SERVERS])
        self.processes.stop(seconds=SERVERS_STOP_SECONDS)

    @property
    def is_running(self) -> bool:
        """Return whether all processes were started and none has ended."""
        children = [self.processes.children.get(name) for name in PARTS]
        return all(child is not None and child.poll() is None for child in children)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of its web server and of Celery's two processes."""
        return [
            self.processes.children[name].pid for name in PARTS if name in self.processes.children
        ]

    # ---- its status

    def fetch_status(self, seconds: float = 2.0) -> dict[str, Any] | None:
        """Fetch /status; None if it does not answer."""
        try:
            answer = _http.get(f"{self.url}/status", timeout=seconds)
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None


def common_state_hash(mirrors: Sequence[DemoMirror]) -> str | None:
    """Return the state hash that all mirrors publish; None if one is silent or they differ."""
    statuses = [mirror.fetch_status() for mirror in mirrors]
    hashes = {status["state"] if status else None for status in statuses}
    return hashes.pop() if len(hashes) == 1 else None


def build_mirror_list(
    folder: Path, mirrors: Sequence[DemoMirror], before: MirrorList | None = None
) -> SignedMirrorList | None:
    """Build a signed list that names these mirrors at their present addresses.

    Args:
        folder: Holds the one root's key.
        mirrors: The mirrors.
        before: The list in force; its other mirrors remain listed, because a list drops none.

    Returns:
        The list; None if `before` is still correct.
    """
    root = Identity.load_or_create(folder / ROOT_KEY)
    known = {entry.key: entry for entry in before.mirrors} if before else {}
    named = {
        mirror.key: known.get(mirror.key, mirror.list_entry).model_copy(update={"url": mirror.url})
        for mirror in mirrors
    }
    if before and known == named and before.expires > time.time() + LIST_SECONDS / 2:
        return None
    new_list = MirrorList(
        version=before.version + 1 if before else 1,
        expires=time.time() + LIST_SECONDS,
        threshold=1,
        roots=[root.key],
        mirrors=list({**known, **named}.values()),
    )
    return add_signature(root, unsigned_list(new_list))
