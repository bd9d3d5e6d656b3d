"""Run docs/operate.md: its commands in order, on a Postgres and a Valkey of their own.

They install a site, start it, back it up, restore and upgrade it. `guide_session.STAND_INS` names
the programs that cannot run here, and why.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psycopg
import pytest
import redis
import yaml
from django.core.management import load_command_class
from helpers.paths import ROOT
from helpers.site.guide_session import GUIDE, GuideSession, Ports, read_blocks
from helpers.site.systemd_units import UnitProcesses, read_environment

from coordinator.demo.processes import ChildCommand, ProcessGroup
from coordinator.lib.embedded import embedded_servers
from coordinator.lib.embedded.installed_servers import find_valkey_program
from coordinator.lib.free_ports import ReservedPort

pytestmark = [pytest.mark.slow, pytest.mark.integration]
DEPLOY = ROOT / "docs" / "deploy"
COMPOSE_WORDS = ["compose", "-f", "docs/deploy/compose.yaml", "--env-file", "barnraise.env"]
DATABASE = "postgresql://barnraise:password@127.0.0.1:5432/barnraise"
PROXIED = {"Host": "barn.example.org", "X-Forwarded-Proto": "https"}
# What needs the name barn.example.org and a proxy with a certificate for it.
NOT_HERE = {"address", "websockets"}


def start_postgres(processes: ProcessGroup, folder: Path, port: int) -> dict[str, str]:
    """Start a new Postgres as a distribution has it: local users by name, others by password.

    Returns:
        Variables with which the shell's tools find it.
    """
    (server,) = embedded_servers.server_commands(folder, valkey=False, durable=False)
    rules = folder / "postgres" / "pg_hba.conf"
    rules.write_text(re.sub(r"^(host .*)trust$", r"\1scram-sha-256", rules.read_text(), flags=re.M))
    command = (*server.command, "-h", "127.0.0.1", "-p", str(port))
    child = ChildCommand(command, {}, server.user, stop_signal=server.stop_signal, is_server=True)
    processes.start_child("postgres", child)
    socket = re.search(r"host=(.*)", server.url)[1]
    programs = Path(server.command[0]).parent
    tools = {"PGHOST": socket, "PGPORT": str(port), "PGUSER": "barnraise"}
    url = f"postgresql://postgres@:{port}/postgres?host={socket}"
    wait_for(lambda: psycopg.connect(url).close())
    return {**tools, "PATH": f"{programs}:{os.environ['PATH']}", "LANG": "C"}


def start_valkey(processes: ProcessGroup, folder: Path, port: int) -> None:
    """Start a Valkey with the lines that the guide adds to its configuration."""
    (sentence,) = re.findall(r"^\* Write (.*) into `valkey.conf`", GUIDE.read_text(), re.M)
    configuration = folder / "valkey.conf"
    lines = [*re.findall(r"`([^`]+)`", sentence), f"port {port}", f"dir {folder}"]
    assert len(lines) == 5
    configuration.write_text("\n".join(lines))
    processes.start("valkey", find_valkey_program(), configuration)
    wait_for(redis.Redis(port=port, password="password").ping)


def wait_for(action: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            action()
            return
        except (psycopg.OperationalError, redis.ConnectionError, httpx.HTTPError):
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module")
def session():
    """Yield the session after all blocks have run; the site runs still."""
    folder = Path(tempfile.mkdtemp(prefix="barnraise-guide-"))
    folder.chmod(0o755)  # Postgres runs as a user of its own where root runs this
    reserved = [ReservedPort() for _ in range(3)]
    ports = Ports(*(port.number for port in reserved))
    for port in reserved:
        port.release()
    processes = ProcessGroup(folder / "logs")
    try:
        tools = start_postgres(processes, folder, ports.postgres)
        start_valkey(processes, folder, ports.valkey)
        guide = GuideSession(folder, ports, tools, lambda *words: units.control(*words))
        units = UnitProcesses(folder / "etc/systemd/system", folder / "services", guide.place)
        try:
            guide.run([block for block in read_blocks() if block.language == "sh"])
            yield guide
        finally:
            print(guide.output, units.log_tails())
            units.stop()
            guide.close()
    finally:
        processes.stop()
        shutil.rmtree(folder, ignore_errors=True)


def check_container_command(services: dict, words: list[str]) -> None:
    """Check that a service exists, and that the image has the command and its folder."""
    service, program, manage, name, *arguments = words
    assert (program, manage) == (".venv/bin/python", "manage.py")
    (app,) = [
        path.parents[2] for path in (ROOT / "platform/coordinator").rglob(f"commands/{name}.py")
    ]
    command = load_command_class(f"coordinator.{app.name}", name)
    command.create_parser("manage.py", name).parse_args(arguments)
    volumes = [volume.split(":")[1] for volume in services[service]["volumes"]]
    folders = [Path(word) for word in arguments if word.startswith("/")]
    assert all(str(folder.parent) in volumes for folder in folders)


def test_every_command_of_the_guide_succeeds(session):
    assert session.failed == [".venv/bin/python manage.py doctor"]  # see the next test


def test_doctor_finds_only_what_needs_a_proxy(session):
    shown = re.findall(r"^FAILURE +(.+?)  ", session.output, re.M)
    assert set(shown) == NOT_HERE


def test_restored_and_upgraded_site_serves_its_owner(session):
    url = session.place("http://127.0.0.1:8000")
    wait_for(lambda: httpx.get(f"{url}/readyz", timeout=30).raise_for_status())
    assert httpx.get(f"{url}/runs/", headers=PROXIED).status_code == 200
    with psycopg.connect(session.place(f"{DATABASE}_restored")) as connection:
        people = connection.execute("SELECT email, is_staff FROM accounts_user").fetchall()
    assert people == [("you@example.org", True)]


def test_advice_for_the_role_is_valid(session):
    (statements,) = re.findall(r"`(ALTER ROLE[^`]+)`", GUIDE.read_text())
    with psycopg.connect(session.place(DATABASE)) as connection:
        connection.execute(statements)


def test_container_commands_fit_the_compose_file(session):
    text = (DEPLOY / "compose.yaml").read_text()
    compose = yaml.safe_load(text)
    secrets = read_environment((session.home / "site" / "barnraise.env").read_text())
    assert set(secrets) == set(re.findall(r"\$\{(\w+):\?\}", text))
    assert all(len(value) > 40 for value in secrets.values())
    seen = []
    for words in session.calls["docker"]:
        if words[:2] == ["volume", "rm"]:
            # Compose puts the name of the file's folder before the names of its volumes.
            removed = {word.removeprefix(f"{DEPLOY.name}_") for word in words[2:]}
            assert removed == set(compose["volumes"]) - {"backups"}
            continue
        assert words[:5] == COMPOSE_WORDS
        seen.append(words[5])
        if words[5] in ("exec", "run"):
            command = [word for word in words[6:] if word != "--rm"]
            placed = [word.replace(str(session.home), "/srv/barnraise") for word in command]
            check_container_command(compose["services"], placed)
        else:
            assert set(words[6:]) <= {"--build", "--detach"}
    assert seen == ["up", "exec", "exec", "up", "down", "run", "up"]
