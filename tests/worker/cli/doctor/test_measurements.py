"""What the doctor measures on this machine and of its site."""

import json
import socket
import struct

import certifi
import psutil
import pytest
from example_hardware import cpu_machine
from helpers.worker.command_line import EXCHANGE
from helpers.worker.fake_coordinator import MACHINE, FakeCoordinator
from typer.testing import CliRunner

from barnraise.cli import main
from barnraise.cli.doctor import command, measurements
from barnraise.cli.doctor.findings import Level
from barnraise.cli.doctor.measurements import (
    count_open_files,
    describe_filesystem,
    describe_web_access,
    find_filesystem,
    find_write_error,
    fit_presets,
    measure_machine_facts,
    measure_mirror,
    read_line_rates,
)
from barnraise.cli.doctor.router_hops import find_hops, parse_offender
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import StateError
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.protocol.signing import Identity
from barnraise.state_dir import SiteMembership, StateDir


def test_folder_that_cannot_be_written_is_found(tmp_path):
    assert find_write_error(tmp_path) == "" and not list(tmp_path.iterdir())
    assert find_write_error(tmp_path / "missing") == "No such file or directory"


def test_filesystem_is_the_one_mounted_closest(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert find_filesystem(tmp_path) == "", "no mounts are listed"
    home = tmp_path / "a home"
    home.mkdir()
    mounts = tmp_path / "self" / "mounts"
    mounts.parent.mkdir()
    escaped = str(home).replace(" ", "\\040")
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\nnone /proc proc rw\n")
    assert find_filesystem(home / "state") == "nfs4"
    assert find_filesystem(tmp_path) == "ext4"


@pytest.mark.parametrize(("kind", "part"), [("nfs4", "network drive"), ("tmpfs", "is lost")])
def test_unusual_filesystem_is_one_sentence_with_the_remedy(tmp_path, kind, part):
    sentence = describe_filesystem(tmp_path, kind)
    assert part in sentence and "--home FOLDER" in sentence
    assert describe_filesystem(tmp_path, "ext4") == ""


def test_limit_of_open_files_is_read():
    files = count_open_files()
    assert files is None or files > 0


@pytest.mark.parametrize(
    ("sources", "address"),
    [
        ({4: "127.0.0.1", 6: "::1"}, ""),
        ({4: "192.168.1.5", 6: "2001:db8::5"}, "192.168.1.5"),
        ({6: "2001:db8::5"}, "2001:db8::5"),
        ({6: "fe80::1"}, ""),
    ],
)
def test_address_of_this_machine_itself_is_no_way_out(monkeypatch, sources, address):
    monkeypatch.setattr(measurements, "read_default_sources", lambda: sources)
    monkeypatch.setattr(measurements, "find_hops", list)
    network = measurements.measure_network()
    assert network.lan_address == address
    assert (network.has_ipv4, network.has_ipv6) == ("." in address, bool(address) and 6 in sources)


def test_routers_on_the_way_are_read_from_the_error_queue():
    router = socket.inet_aton("192.168.1.1")
    error = struct.pack("=IBBBBII", 113, 2, 11, 0, 0, 0, 0)
    address = struct.pack("=HH", socket.AF_INET, 0) + router + bytes(8)
    assert parse_offender(error + address) == "192.168.1.1"
    local = struct.pack("=IBBBBII", 111, 1, 0, 0, 0, 0, 0)
    assert parse_offender(local + address) == parse_offender(b"") == ""
    assert find_hops(1, ("127.0.0.1", 9)) in ([""], []), "nobody is between"


def test_mirror_states_latency_clock_or_the_reason(tmp_path):
    site = FakeCoordinator()
    site.clock_offset = 60.0
    try:
        found = measure_mirror(CoordinatorClient(site.url, Identity(b"d" * 32)))
        assert found.seconds is not None and found.clock_seconds == pytest.approx(-60, abs=30)
    finally:
        site.close()
    gone = measure_mirror(CoordinatorClient(site.url, Identity(b"d" * 32)))
    assert gone.seconds is None and "does not answer" in gone.error


def test_proxies_and_certificates_in_use_are_shown(tmp_path, monkeypatch):
    for name in ("https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://ada:geheim@10.0.0.9:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    found = describe_web_access(["https://site.example", "https://10.0.0.1"])
    assert found.level is Level.OK and found.sentence == (
        "Reached: https://site.example through the proxy http://10.0.0.9:3128 of HTTPS_PROXY, "
        "https://10.0.0.1 without a proxy. "
        f"Trusted certificates: those in {certifi.where()} (SSL_CERT_FILE)."
    )
    missing = tmp_path / "ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(missing))
    found = describe_web_access([])
    assert found.level is Level.PROBLEM and f"{missing}, which does not" in found.sentence


def test_doctor_names_certificates_that_do_not_exist(tmp_path, monkeypatch):
    mirror = MirrorView(key="a" * 64, name="small", protocols=[1], time=0)
    home = StateDir(tmp_path)
    home.save_membership(SiteMembership(url="https://a.example", mirror=mirror, machine=MACHINE))
    missing = tmp_path / "ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(missing))
    facts = measure_machine_facts(home, None)
    assert f"SSL_CERT_FILE names {missing}" in facts.mirrors[0].error
    assert facts.web is not None and facts.web.level is Level.PROBLEM


def test_line_rates_are_those_of_the_last_workers(tmp_path):
    home = StateDir(tmp_path)
    assert read_line_rates(home) == (0.0, 0.0)
    folder = home.open_run("01890000-0000-7000-8000-000000000001")
    exchange = EXCHANGE | {"uplink_rate": 2e6, "received_rate": 3e6}
    (folder.path / "status.json").write_text(json.dumps({"exchange": exchange}))
    assert read_line_rates(home) == (2e6, 3e6)
    folder.close()


def test_presets_are_listed_up_to_the_first_that_does_not_fit():
    fits = list(fit_presets(cpu_machine(memory=2 * 10**9, disk=10**9), Limits()))
    assert fits[0].tokens_per_second > 0 and fits[-1].tokens_per_second == 0
    assert all(fit.tokens_per_second for fit in fits[:-1])


def test_doctor_prints_saves_and_returns_problems(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise StateError("there is no such device")

    monkeypatch.setattr(command, "measure_machine", fail)
    result = CliRunner().invoke(main.app, ["doctor", "--json", "--home", str(tmp_path)])
    answer = json.loads(result.stdout)
    levels = {finding["level"] for finding in answer["findings"]}
    assert result.exit_code == ("problem" in levels)
    assert any("barnraise login URL" in finding["sentence"] for finding in answer["findings"])
    saved = json.loads((tmp_path / "checkup.json").read_text())
    assert saved["reach"] == answer["reach"] and len(saved["findings"]) == len(answer["findings"])
    assert "there is no such device" in result.stderr
    shown = CliRunner().invoke(main.app, ["doctor", "--home", str(tmp_path)], env={"COLUMNS": "60"})
    assert max(map(len, shown.stdout.splitlines())) <= 60 and "Python" in shown.stdout


@pytest.mark.parametrize("is_site_gone", [False, True])
def test_doctor_shows_its_findings_although_peers_cannot_be_asked(
    tmp_path, monkeypatch, is_site_gone
):
    def fail(*arguments: object) -> None:
        raise StateError("there is no such device")

    monkeypatch.setattr(command, "measure_machine", fail)
    site = FakeCoordinator()
    mirror = MirrorView(key=site.identity.key, name="small", protocols=[1], time=0)
    membership = SiteMembership(url=site.url, mirror=mirror, machine=MACHINE)
    StateDir(tmp_path).save_membership(membership)
    try:
        if is_site_gone:
            site.close()
        answer = CliRunner().invoke(main.app, ["doctor", "no-run", "--home", str(tmp_path)])
    finally:
        site.close()
    shown = " ".join(answer.stdout.split())
    assert answer.exit_code == 1 and "Python" in shown
    assert "The machines of the run could not be asked" in shown
    assert ("HTTPS_PROXY" in shown) == is_site_gone


def test_first_join_checks_the_machine_once(tmp_path, capsys):
    home = StateDir(tmp_path)
    command.run_first_checkup(home)
    assert (tmp_path / "checkup.json").exists()
    before = (tmp_path / "checkup.json").stat().st_mtime_ns
    command.run_first_checkup(home)
    assert (tmp_path / "checkup.json").stat().st_mtime_ns == before
    assert "barnraise login URL" in capsys.readouterr().err
