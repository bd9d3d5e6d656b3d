"""Test a site on two hosts: one database and one Valkey, a state folder and web processes of each.

A small proxy stands for the one in front of them: it passes each connection to the first host that
accepts it.
"""

import json
import os
import shutil
import socket
import threading
import time
from contextlib import suppress

import httpx
import psycopg
import pytest
from helpers.mirrors.mirror_pair import PASSWORD, MirrorProcess, ReportingMachine, create_run
from helpers.site import migrated_database
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

pytestmark = [pytest.mark.slow, pytest.mark.integration]
KEYS = ("mirror.key", "secret_key")
PATIENCE = 60.0  # seconds, on a busy machine
PROMPT = 2.0  # seconds within which a report at one host is a delta at the other
TRIES = 5  # one of them must be prompt; a busy machine delays some


class FailoverProxy:
    """Pass connections to the first of several ports that accepts them."""

    def __init__(self, *ports: int):
        self._ports = ports
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # until it is closed
            while True:
                client, _ = self._listener.accept()
                for port in self._ports:
                    try:
                        server = socket.create_connection(("127.0.0.1", port))
                    except OSError:
                        continue
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=self._pump, args=pair, daemon=True).start()
                    break
                else:
                    client.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                target.sendall(part)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def hosts(state, tmp_path):
    """Run two hosts; the second one has copies of the first one's keys, as docs/operate.md says."""
    first = MirrorProcess("hosts", tmp_path, 4)
    second = MirrorProcess("other_host", tmp_path, 4)
    second.environment |= {
        "DATABASE_URL": first.environment["DATABASE_URL"],
        "BARNRAISE_NAME": first.environment["BARNRAISE_NAME"],
    }
    migrated_database.create_database("mirror_hosts")
    try:
        run = create_run(first)["run"]
        for name in KEYS:
            shutil.copy(tmp_path / "hosts" / name, tmp_path / "other_host" / name)
        first.start()
        second.start()
        yield first, second, run
    finally:
        for host in (first, second):
            host.processes.stop()
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as server:
            server.execute("DROP DATABASE mirror_hosts WITH (FORCE)")


def sign_in(url: str) -> httpx.Client:
    client = httpx.Client(follow_redirects=True, headers={"Referer": url}, timeout=PATIENCE)
    client.get(f"{url}/accounts/login/")
    token = client.cookies["csrftoken"]
    fields = {"login": "ida@example.org", "password": PASSWORD, "csrfmiddlewaretoken": token}
    client.headers["Origin"] = url
    assert "Ida" in client.post(f"{url}/accounts/login/", data=fields).text
    return client


def watch(url: str, run: str):
    return connect(f"{url.replace('http', 'ws')}/ws/runs/{run}/", origin=url)


def wait_for_step(watcher, step: int) -> float:
    """Wait until a delta shows that a machine is at this step; return the seconds."""
    started = time.monotonic()
    while f'"step":{step}' not in watcher.recv(PATIENCE).replace(" ", ""):
        assert time.monotonic() < started + PATIENCE
    return time.monotonic() - started


def test_people_watchers_and_workers_change_between_hosts(hosts):
    first, second, run = hosts
    person = sign_in(first.url)
    for host in hosts[:2]:
        page = person.get(f"{host.url}/account/")
        assert page.status_code == 200 and page.url.path == "/account/", "signed out"

    machine = ReportingMachine(1)
    delays = []
    with watch(second.url, run) as watcher:
        for number in range(1, TRIES + 1):
            machine.send_reports(first, run, number, joined=number > 1, step=1000 + number)
            delays.append(wait_for_step(watcher, 1000 + number))
    assert min(delays) <= PROMPT, delays

    proxy = FailoverProxy(first.port, second.port)
    through = type("Through", (), {"url": proxy.url})
    try:
        with watch(proxy.url, run) as watcher:
            machine.send_reports(through, run, TRIES + 1, joined=True, step=2001)
            wait_for_step(watcher, 2001)
            first.kill()
            with pytest.raises(ConnectionClosed):
                while True:
                    watcher.recv(PATIENCE)
        machine.send_reports(through, run, TRIES + 2, joined=True, step=2002)
        with watch(proxy.url, run) as watcher:
            machine.send_reports(through, run, TRIES + 3, joined=True, step=2003)
            wait_for_step(watcher, 2003)
        assert person.get(f"{proxy.url}/account/").url.path == "/account/"
        machines = json.dumps(second.snapshot(run))
        assert '"step": 2003' in machines
    finally:
        proxy.close()
