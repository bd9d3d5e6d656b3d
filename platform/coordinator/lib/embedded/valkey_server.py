"""The embedded Valkey: its files, its process and its address."""

import json
import subprocess
import time
from pathlib import Path

import psutil
import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from coordinator.lib.embedded.installed_servers import find_valkey_program
from coordinator.lib.embedded.server_command import START_SECONDS, VALKEY, ServerCommand
from coordinator.lib.free_ports import ReservedPort, is_free, random_free_port
from coordinator.lib.process_identity import is_same_process, start_time, wait_for_end, works_in
from coordinator.lib.secret_files import load_or_create_secret

# Without these a client waits long before it reports that nobody answers.
NO_RETRY = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 2}
_reserved_ports: dict[Path, ReservedPort] = {}  # by the folder of the Valkey that will have it


def start_valkey(state: Path, durable: bool) -> str:
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


def reserve_valkey(state: Path) -> str:
    """Reserve a port for a Valkey that does not run yet, and return the URL that it will have."""
    folder = state / VALKEY
    password = load_or_create_secret(folder / "password")
    port = _reserved_ports[folder] = ReservedPort()
    (folder / "port").write_text(str(port.number))
    return _valkey_url(port.number, password)


def prepare_valkey(state: Path, durable: bool) -> ServerCommand:
    """Create the files of Valkey where they are missing, and return how to run it."""
    folder = state / VALKEY
    folder.mkdir(exist_ok=True)
    password = load_or_create_secret(folder / "password")
    port = _choose_valkey_port(folder)
    command = _write_configuration(folder, port, password, durable, log="")
    return ServerCommand(VALKEY, command, _valkey_url(port, password))


def find_valkey_url(state: Path) -> str:
    """Return the URL of a Valkey whose files exist, running or not; "" if they do not."""
    port_file = state / VALKEY / "port"
    if not port_file.exists() or not (port := port_file.read_text()):
        return ""
    return _valkey_url(int(port), load_or_create_secret(state / VALKEY / "password"))


def ping_valkey(url: str) -> None:
    """Wait for the reply of a server.

    Raises:
        redis.exceptions.RedisError: The server does not answer.
    """
    with redis.Redis.from_url(url, **NO_RETRY) as client:
        client.ping()


def stop_valkey(state: Path) -> None:
    """Stop the embedded Valkey, if it runs."""
    folder = state / VALKEY
    process = _valkey_process(folder)
    if process:
        process.terminate()
        if not wait_for_end(process, 10.0):
            process.kill()
            if not wait_for_end(process, 5.0):
                raise RuntimeError(f"the embedded Valkey, process {process.pid}, does not end")
    (folder / "pid").unlink(missing_ok=True)


def _valkey_url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


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


def _write_configuration(
    folder: Path, port: int, password: str, durable: bool, log: Path | str
) -> tuple[str, ...]:
    """Write the server's configuration, and return its command line; log "" is its output."""
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
    return (str(find_valkey_program()), str(config))


def _spawn_valkey(folder: Path, port: int, password: str, durable: bool) -> None:
    """Start a server process and wait until it answers."""
    process = subprocess.Popen(
        _write_configuration(folder, port, password, durable, folder / "log"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / "pid").write_text(json.dumps([process.pid, start_time(process.pid)]))
    deadline = time.monotonic() + START_SECONDS
    while not _valkey_answers(folder, port, password):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the embedded Valkey did not start; {folder / 'log'} says why")
        time.sleep(0.02)


def _valkey_process(folder: Path) -> psutil.Process | None:
    """Return the server process of this folder if it still runs, answering or not."""
    try:
        pid, started = json.loads((folder / "pid").read_text())
        process = psutil.Process(pid)
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None
    is_ours = is_same_process(pid, started) and works_in(process, folder)
    return process if is_ours else None


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
