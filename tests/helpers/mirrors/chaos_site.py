"""A whole site of its own under a supervisor, and what can happen to each of its processes.

Web, worker and beat reach Postgres and Valkey through proxies, which cut their connections; where
root may mount, each server and the site's own files have a small file system to fill.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import psycopg
import redis
from helpers.mirrors.chaos_plan import Fault, FaultKind, Hit
from helpers.paths import TESTS
from helpers.site import migrated_database
from helpers.site.management import manage

from coordinator.demo.supervised_site import BEAT, WEB, WORKER, SupervisedSite
from coordinator.demo.supervisor import Supervisor
from coordinator.lib.embedded.server_command import POSTGRES, VALKEY
from coordinator.lib.free_ports import ReservedPort, random_free_port

CLIENTS = (WEB, WORKER, BEAT)
SERVERS = (POSTGRES, VALKEY)
STATE_MEGABYTES = 64  # of the file system of keys and logs
SERVER_MEGABYTES = 384  # of each server's
START_SECONDS = 600.0
RUNNING_SECONDS = 600.0  # until a process that a fault is planned for must run
PULSE_SECONDS = (0.1, 0.4)  # that a process with a slow disk stands still at a time
SOCKET = ".s.PGSQL.5432"


class ChaosSite:
    """Run a site, and hit its processes.

    Args:
        folder: An empty folder with a short path that every user may enter.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.state = folder / "state"
        self.reserved_port = ReservedPort()
        self.port = self.reserved_port.number
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {
            "BARNRAISE_STATE": str(self.state),
            "DJANGO_SETTINGS_MODULE": "coordinator.settings",
            "EMAIL_URL": f"file://{folder}/emails",
        }
        self.mounted = [
            path
            for path, megabytes in (
                (self.state, STATE_MEGABYTES),
                (self.state / POSTGRES, SERVER_MEGABYTES),
                (self.state / VALKEY, SERVER_MEGABYTES),
            )
            if mount_small_file_system(path, megabytes)
        ]
        self.site = SupervisedSite(self.state, self.state / "logs", self.port, environment)
        self._proxy: subprocess.Popen | None = None
        self._proxy_lock = threading.Lock()

    @property
    def supervisor(self) -> Supervisor:
        """Return the supervisor of the site's processes."""
        return self.site.supervisor

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        """List what can be done on this machine: without root no disk is filled."""
        return tuple(k for k in FaultKind if k is not FaultKind.FULL or self.mounted)

    # ---- start and end

    def open(self) -> None:
        """Start the servers, create the tables, and start the site's processes."""
        with without_server_addresses():
            self.site.start_servers(durable=True)
        self.database_url = self.site.environment["DATABASE_URL"]
        self.valkey = redis.Redis.from_url(
            self.site.environment["REDIS_URL"], decode_responses=True, socket_timeout=2
        )
        self.supervisor.count_restarts_in(self.site.environment["REDIS_URL"])
        migrated_database.create_tables(self.database_url)
        self._start_proxies()
        started = time.monotonic()
        direct = dict(self.site.environment)
        self.reserved_port.release()
        for name, start in (
            (WEB, self.site.start_web),
            (WORKER, self.site.start_worker),
            (BEAT, self.site.start_beat),
        ):
            self.site.environment = {**direct, **self._proxied_addresses(name)}
            start()
        self.site.environment = direct
        while not self.is_ready():
            assert time.monotonic() - started < START_SECONDS, self.logs()
            time.sleep(0.1)

    def close(self) -> None:
        """Stop everything, and remove the file systems."""
        self.site.stop()
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
            self._proxy.stdin.close()
            self._proxy.stdout.close()
        for path in reversed(self.mounted):
            subprocess.run(["umount", "--lazy", path], check=True)

    def manage(self, *command: str) -> str:
        """Run a management command, and return its output."""
        return manage(self.site.environment, *command)

    def is_ready(self) -> bool:
        """Return whether the site answers that it is ready."""
        assert not self.supervisor.failure, self.supervisor.failure
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        return False

    def logs(self) -> str:
        """Return the end of every process's log."""
        names = sorted(path.stem for path in self.supervisor.logs.glob("*.log"))
        return "\n".join(f"---- {name}\n{self.supervisor.log_tail(name)}" for name in names)

    @contextmanager
    def database(self) -> Iterator[psycopg.Cursor]:
        """Connect to the database, past the proxies."""
        with psycopg.connect(self.database_url, autocommit=True, connect_timeout=2) as connection:
            yield connection.cursor()

    # ---- faults

    def inject(self, fault: Fault) -> None:
        """Hit the processes, and return when the fault has ended."""
        time.sleep(fault.pause)
        threads = [
            threading.Thread(target=self._hit, args=(hit, fault.seconds)) for hit in fault.hits
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _hit(self, hit: Hit, seconds: float) -> None:
        actions = {
            FaultKind.KILL: self._kill,
            FaultKind.STOP: self._suspend,
            FaultKind.CUT: self._cut,
            FaultKind.RESET: self._reset,
            FaultKind.FULL: self._fill_disk,
            FaultKind.SLOW: self._slow_down,
        }
        actions[hit.kind](hit.target, seconds)

    def _kill(self, name: str, seconds: float) -> None:
        os.kill(self._wait_for_process(name).pid, signal.SIGKILL)

    def _suspend(self, name: str, seconds: float) -> None:
        with suspended(self._wait_for_process(name)):
            time.sleep(seconds)

    def _slow_down(self, name: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        pulses = random.Random(name)
        while time.monotonic() < end:
            with suspended(self._wait_for_process(name)):
                time.sleep(pulses.uniform(*PULSE_SECONDS))
            time.sleep(PULSE_SECONDS[0])

    def _cut(self, name: str, seconds: float) -> None:
        self._disturb_links("cut", name, seconds)

    def _reset(self, name: str, seconds: float) -> None:
        self._disturb_links("reset", name, seconds)

    def _disturb_links(self, command: str, name: str, seconds: float) -> None:
        links = [f"{client}-{server}" for client in CLIENTS for server in SERVERS]
        mine = [link for link in links if name in link.split("-")]
        self._command_proxy(command, mine)
        time.sleep(seconds)
        self._command_proxy("heal", mine)

    def _fill_disk(self, name: str, seconds: float) -> None:
        ballast = (self.state / name if name in SERVERS else self.state) / f"ballast-{name}"
        fill_file_system(ballast)
        time.sleep(seconds)
        ballast.unlink()

    def _wait_for_process(self, name: str) -> psutil.Process:
        """Return a process; one that an earlier fault ended is started first."""
        end = time.monotonic() + RUNNING_SECONDS
        while (pid := self.supervisor.running_pid(name)) is None:
            assert not self.supervisor.failure, self.supervisor.failure
            assert time.monotonic() < end, f"{name} does not run:\n{self.logs()}"
            time.sleep(0.05)
        return psutil.Process(pid)

    # ---- proxies

    def _start_proxies(self) -> None:
        links = {}
        self._listening: dict[str, dict[str, str]] = {}
        valkey = urlsplit(self.site.environment["REDIS_URL"])
        socket = str(self.state / POSTGRES / SOCKET)
        for client in CLIENTS:
            folder = self.folder / client
            folder.mkdir()
            port = random_free_port()
            links[f"{client}-{POSTGRES}"] = {"listen": str(folder / SOCKET), "to": socket}
            links[f"{client}-{VALKEY}"] = {
                "listen": ["127.0.0.1", port],
                "to": ["127.0.0.1", valkey.port],
            }
            self._listening[client] = {
                "DATABASE_URL": f"postgresql://postgres:@/barnraise?host={folder}",
                "REDIS_URL": valkey._replace(
                    netloc=f":{valkey.password}@127.0.0.1:{port}"
                ).geturl(),
            }
        self._proxy = subprocess.Popen(
            [sys.executable, TESTS / "helpers" / "network" / "cutting_proxy.py", json.dumps(links)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._proxy.stdout.readline() == "ready\n"

    def _proxied_addresses(self, client: str) -> dict[str, str]:
        return self._listening[client]

    def _command_proxy(self, command: str, links: list[str]) -> None:
        with self._proxy_lock:
            for link in links:
                self._proxy.stdin.write(f"{command} {link}\n")
            self._proxy.stdin.flush()


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Suspend a process and then its children, who cannot become more meanwhile."""
    stopped: list[psutil.Process] = []
    try:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            stopped.append(process)
            for child in process.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.suspend()
                    stopped.append(child)
        yield
    finally:
        for each in reversed(stopped):
            with suppress(psutil.NoSuchProcess):
                each.resume()


def mount_small_file_system(path: Path, megabytes: int) -> bool:
    """Create a folder on a file system of its own, and return whether root could do that."""
    path.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    options = f"size={megabytes}m,mode=755"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "chaos", path], capture_output=True, check=False
    )
    return done.returncode == 0  # a container's root may not mount


def fill_file_system(ballast: Path) -> None:
    """Write a file until nothing is left."""
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)


@contextmanager
def without_server_addresses() -> Iterator[None]:
    """Hide the addresses of the tests' own servers from a site that starts its own."""
    names = ("DATABASE_URL", "REDIS_URL")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
