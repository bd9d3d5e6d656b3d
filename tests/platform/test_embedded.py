"""Servers out of wheels, in a folder of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from coordinator import embedded

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys, time
from pathlib import Path
from urllib.parse import urlsplit
from coordinator import embedded
print(*embedded.start(Path(sys.argv[1])), flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o755)
    yield tmp_path / "state"
    embedded.stop(tmp_path / "state", force=True)


def other_process(folder: Path) -> tuple[subprocess.Popen, list[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", USE, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().split()


def test_what_was_stored_is_there_after_a_restart_at_the_same_addresses(folder):
    first = embedded.start(folder)
    with psycopg.connect(first[0]) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with redis.Redis.from_url(first[1]) as valkey:
        valkey.set("kept", 42)
    embedded.stop(folder)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(first[0])
    assert embedded.start(folder) == first
    with psycopg.connect(first[0]) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
    with redis.Redis.from_url(first[1]) as valkey:
        assert valkey.get("kept") == b"42"


def test_a_second_process_shares_the_servers_and_the_last_one_stops_them(folder):
    ours = embedded.start(folder)
    process, theirs = other_process(folder)
    assert theirs == list(ours)
    embedded.stop(folder)  # not the last: the other process goes on using them
    psycopg.connect(ours[0]).close()
    process.send_signal(signal.SIGKILL)  # it cannot say goodbye
    process.wait()
    process.stdout.close()
    assert embedded.start(folder) == ours
    embedded.stop(folder)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(ours[0])


def test_reserved_addresses_are_the_ones_the_servers_get(folder):
    assert embedded.reserve(folder) == embedded.start(folder, durable=False)


def test_valkey_listens_to_those_who_know_its_password_alone(folder):
    folder.mkdir()
    _, url = embedded.start(folder, postgres=False)
    with (
        redis.Redis(port=urlsplit(url).port, retry=Retry(NoBackoff(), 0)) as stranger,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        stranger.ping()
    assert (folder / "valkey" / "password").stat().st_mode & 0o077 == 0
    assert (folder / "valkey" / "valkey.conf").stat().st_mode & 0o077 == 0


def test_given_addresses_start_nothing(folder, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://db/x")
    monkeypatch.setenv("REDIS_URL", "redis://cache")
    assert embedded.urls(folder) == ("postgresql://db/x", "redis://cache")
    assert not folder.exists()


def test_a_secret_is_made_once_and_for_its_owner_alone(folder):
    path = folder / "secret_key"
    assert embedded.kept_secret(path) == embedded.kept_secret(path)
    assert path.stat().st_mode & 0o077 == 0
