"""Run Postgres and Valkey from Python wheels, or from the PATH where a system has no wheel.

They are started on first use and shared by processes.
`start(state)` makes this process a user of both servers and starts what does not run. `stop(state)`
ends that, and the last user's stop (or exit) stops the servers. A killed process does not count as
a user; servers that it left behind are found by the next start and stopped after it. Both servers
keep their files in the state folder: Postgres with fsync, Valkey with an append-only file synced
every second.

A supervisor runs the servers as its own children instead: it takes the state folder with
`claim(state)` and starts what `server_commands(state)` returns. Until it releases the folder,
`start` and `stop` of other processes leave the servers alone.
"""

import atexit
import os
import shutil
import time
from pathlib import Path

import psutil
import psycopg
import redis.exceptions
from filelock import FileLock, Timeout

from coordinator.lib.embedded import postgres_server, valkey_server
from coordinator.lib.embedded.claims import is_supervised, list_users, supervisor_lock, write_users
from coordinator.lib.embedded.server_command import POSTGRES, VALKEY, ServerCommand
from coordinator.lib.process_identity import works_in

SUPERVISED_SECONDS = 60.0  # that a supervisor may take to create and start both
PROBE_SECONDS = 1.0  # more than `is_supervised` in another process has the lock
# Free space without which no server starts: Postgres needs a segment of its log (16 MB) to recover.
MIN_FREE_BYTES = 32 << 20


def start(
    state: Path, *, postgres: bool = True, valkey: bool = True, durable: bool = True
) -> tuple[str, str]:
    """Start the servers that do not run, and register this process as a user.

    Args:
        state: The state folder.
        postgres: Whether Postgres is wanted.
        valkey: Whether Valkey is wanted.
        durable: Whether data survive a power cut; tests do without.

    Returns:
        The URLs, "" for a server that is not wanted.
    """
    state = state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    with FileLock(state / "services.lock"):
        if not is_supervised(state):
            urls_ = (
                postgres_server.start_postgres(state, durable) if postgres else "",
                valkey_server.start_valkey(state, durable) if valkey else "",
            )
            users = list_users(state)
            if os.getpid() not in users:
                write_users(state, [*users, os.getpid()])
                atexit.register(_stop_at_exit, state, os.getpid())
            return urls_
    return _wait_for_supervised(state, postgres=postgres, valkey=valkey)


def reserve(state: Path) -> tuple[str, str]:
    """Return the URLs that `start` will have for a new state folder, without starting anything.

    The folder's path must be short enough for Postgres's socket.
    """
    state = state.resolve()
    database = postgres_server.build_postgres_url(state / POSTGRES)
    return database, valkey_server.reserve_valkey(state)


def stop(state: Path, *, force: bool = False) -> None:
    """End this process's use of the servers; stop them if nobody uses them, or by `force`."""
    state = state.resolve()
    if not (state / "services.lock").exists():
        return
    with FileLock(state / "services.lock"):
        if is_supervised(state):
            return
        users = [] if force else [pid for pid in list_users(state) if pid != os.getpid()]
        write_users(state, users)
        if not users:
            valkey_server.stop_valkey(state)
            postgres_server.stop_postgres(state)


def release(state: Path) -> None:
    """Call `stop` if this process is a user."""
    if os.getpid() in list_users(state.resolve()):
        stop(state)


def _stop_at_exit(state: Path, pid: int) -> None:
    if os.getpid() == pid and state.exists():  # a forked child inherits the hook, not the use
        stop(state)


# ---- servers as children of a supervisor --------------------------------------------------------


def claim(state: Path) -> FileLock:
    """Take a state folder for a supervisor, and stop servers that run there without one.

    Returns:
        The lock to release at the end; a killed process releases it too.

    Raises:
        RuntimeError: Another supervisor has the folder.
    """
    state = state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    stop(state, force=True)
    lock = supervisor_lock(state)
    try:
        lock.acquire(timeout=PROBE_SECONDS)
    except Timeout:
        raise RuntimeError(f"another process runs the servers in {state}: stop it first") from None
    return lock


def server_commands(
    state: Path, *, postgres: bool = True, valkey: bool = True, durable: bool = True
) -> list[ServerCommand]:
    """Create the servers' files where they are missing, and return how to run them.

    The caller has claimed the state folder. Only with `durable` do data survive a power cut.
    """
    state = state.resolve()
    commands = []
    if postgres:
        commands.append(postgres_server.prepare_postgres(state, durable))
    if valkey:
        commands.append(valkey_server.prepare_valkey(state, durable))
    return commands


def start_blocker(state: Path, name: str) -> str:
    """Return why a server cannot start now; "" if it can, after removing stale files."""
    state = state.resolve()
    if reason := full_disk(state, name):
        return reason
    if any(works_in(process, state / name) for process in psutil.process_iter()):
        return f"processes of its predecessor still work in {state / name}"
    if name == POSTGRES:
        postgres_server.remove_stale_pid_files(state)
    return ""


def full_disk(state: Path, *names: str) -> str:
    """Return a sentence about a server whose disk is full; "" if none is."""
    for name in names:
        free = shutil.disk_usage(state / name).free
        if free < MIN_FREE_BYTES:
            left, needed = (f"{size / 1e6:,.0f} MB" for size in (free, MIN_FREE_BYTES))
            return f"the disk of {state / name} has {left} left; {name} needs {needed}"
    return ""


def server_answers(server: ServerCommand) -> bool:
    """Return whether a server answers; on its first start, create the database."""
    try:
        if server.name == POSTGRES:
            postgres_server.create_database(server.url)
        else:
            valkey_server.ping_valkey(server.url)
    except (psycopg.Error, redis.exceptions.RedisError):
        return False
    return True


def _wait_for_supervised(state: Path, *, postgres: bool, valkey: bool) -> tuple[str, str]:
    """Wait until the servers of another process answer, and return their addresses."""
    deadline = time.monotonic() + SUPERVISED_SECONDS
    while time.monotonic() < deadline:
        servers = _supervised_servers(state)
        wanted = [name for name, is_wanted in ((POSTGRES, postgres), (VALKEY, valkey)) if is_wanted]
        if all(name in servers and server_answers(servers[name]) for name in wanted):
            addresses = [servers[name].url if name in wanted else "" for name in (POSTGRES, VALKEY)]
            return addresses[0], addresses[1]
        time.sleep(0.1)
    raise RuntimeError(f"the servers that another process runs in {state} do not answer")


def _supervised_servers(state: Path) -> dict[str, ServerCommand]:
    """Return the servers whose files another process has created, with their addresses."""
    addresses = {
        POSTGRES: postgres_server.find_postgres_url(state),
        VALKEY: valkey_server.find_valkey_url(state),
    }
    return {name: ServerCommand(name, (), url) for name, url in addresses.items() if url}
