"""Run the embedded Postgres and Valkey as supervised children.

`python -m coordinator.demo.servers FOLDER` runs those of one mirror. Usually a site's own processes
start both, and the last of them stops them. If a mirror's processes are killed one by one, the
servers must not depend on any of them, so they belong to this process. With `--manual` it starts
killed servers only at SIGHUP: a drill decides how long they are away.
"""

import json
import queue
import signal
import sys
import time
from functools import partial
from pathlib import Path

from coordinator.demo.processes import ChildCommand
from coordinator.demo.supervisor import Supervisor
from coordinator.lib.embedded import embedded_servers
from coordinator.lib.embedded.server_command import POSTGRES, VALKEY
from coordinator.lib.environment import read

URLS = "servers.json"  # written once both answer: {"DATABASE_URL": …, "REDIS_URL": …}
ENVIRONMENT = {POSTGRES: "DATABASE_URL", VALKEY: "REDIS_URL"}
START_SECONDS = 60.0  # until both servers must answer


def read_urls(folder: Path) -> dict[str, str] | None:
    """Return the servers' URLs; None before they answer."""
    try:
        return json.loads((folder / URLS).read_text())
    except FileNotFoundError:
        return None


def start_servers(supervisor: Supervisor, state: Path, *, durable: bool = True) -> dict[str, str]:
    """Start the servers that no variable names elsewhere, and wait until they answer.

    Args:
        supervisor: Starts them again when they end.
        state: The state folder, which the caller has claimed.
        durable: Whether data survive a power cut.

    Returns:
        The variables with the servers' URLs, for the processes that use them.

    Raises:
        RuntimeError: A server does not start.
    """
    commands = embedded_servers.server_commands(
        state,
        postgres=not read("DATABASE_URL", str, ""),
        valkey=not read("REDIS_URL", str, ""),
        durable=durable,
    )
    for server in commands:
        child = ChildCommand(
            server.command,
            user=server.user,
            folder=state / server.name,
            stop_signal=server.stop_signal,
            is_server=True,
        )
        blocker = partial(embedded_servers.start_blocker, state, server.name)
        if reason := blocker():
            raise RuntimeError(f"{server.name} cannot start: {reason}")
        supervisor.supervise(server.name, child, blocker)
    deadline = time.monotonic() + START_SECONDS
    for server in commands:
        while not embedded_servers.server_answers(server):
            if supervisor.failure or time.monotonic() > deadline:
                tail = supervisor.log_tail(server.name)
                raise RuntimeError(f"{server.name} did not start. The end of its log:\n{tail}")
            time.sleep(0.05)
    return {ENVIRONMENT[server.name]: server.url for server in commands}


def serve(folder: Path, *, manual: bool = False) -> None:
    """Run the servers until SIGTERM."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.put(number))
    if manual:
        _serve_manually(folder, signals)
        return
    lock = embedded_servers.claim(folder)
    supervisor = Supervisor(folder / "logs" / "servers")
    try:
        _write_urls(folder, start_servers(supervisor, folder))
        while not supervisor.failure:
            try:
                if signals.get(timeout=1.0) != signal.SIGHUP:
                    return
            except queue.Empty:
                continue
        sys.exit(supervisor.failure)
    finally:
        supervisor.stop()
        lock.release()


def _serve_manually(folder: Path, signals: "queue.SimpleQueue[int]") -> None:
    while True:
        database, valkey = embedded_servers.start(folder)
        _write_urls(folder, {"DATABASE_URL": database, "REDIS_URL": valkey})
        if signals.get() != signal.SIGHUP:
            embedded_servers.stop(folder)
            return


def _write_urls(folder: Path, addresses: dict[str, str]) -> None:
    unfinished = folder / f"{URLS}.new"
    unfinished.write_text(json.dumps(addresses))
    unfinished.replace(folder / URLS)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), manual="--manual" in sys.argv[2:])
