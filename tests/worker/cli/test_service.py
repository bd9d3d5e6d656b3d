"""Test `barnraise service`: its texts on every system, its refusals, and a real one on Linux."""

import dataclasses
import json
import plistlib
import shutil
import subprocess
from contextlib import closing
from xml.etree import ElementTree

import pytest
from helpers.python_code import run_python
from helpers.worker.command_line import assert_fails, invoke, run_barnraise
from helpers.worker.other_worker import other_worker
from helpers.worker.service_drill import can_run_services, drill_service
from helpers.worker.training_site import RUNS, TrainingSite

from barnraise.cli.mounts import Mount
from barnraise.cli.service import command
from barnraise.cli.service.managers import (
    ServiceManager,
    ServiceState,
    call_system,
    choose_manager,
    choose_service_name,
    parse_state,
)
from barnraise.cli.service.refusals import ServiceFacts, find_refusal, read_boot_mounts
from barnraise.cli.service.service_texts import (
    TASK_NAMESPACE,
    ServiceText,
    render_launchd_agent,
    render_scheduled_task,
    render_systemd_unit,
)
from barnraise.errors import RunEndedError, StateError
from barnraise.protocol.enums import RunStatus
from barnraise.state_dir import StateDir

AWKWARD = '/home/ida/a "b" 100% $HOME & <c> \\d'
SERVICE = ServiceText(
    name="barnraise",
    description="Barnraise: trains in the runs of /home/ida",
    command=("/bin/sh", "-m", "barnraise", "service", "run", "--home", AWKWARD),
    folder="/tmp",
    environment={"HTTPS_PROXY": "http://ida:p%40$ss@proxy:3128", "PYTHONPATH": "/a b"},
)


# ---- texts -------------------------------------------------------------------------------------


def test_systemd_unit_is_polite_and_restarts_with_a_limit():
    lines = render_systemd_unit(SERVICE).decode().splitlines()
    for line in (
        "Nice=19",
        "CPUWeight=1",
        "IOSchedulingClass=idle",
        "Restart=on-failure",
        "RestartSec=5",
        "StartLimitBurst=5",
        "StartLimitIntervalSec=600",
        "WantedBy=default.target",
        'Environment="HTTPS_PROXY=http://ida:p%%40$ss@proxy:3128"',
    ):
        assert line in lines
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start.endswith(r'"--home" "/home/ida/a \"b\" 100%% $$HOME & <c> \\d"')


def test_service_of_the_system_runs_as_its_user_when_the_machine_starts():
    lines = render_systemd_unit(dataclasses.replace(SERVICE, user="ida")).decode().splitlines()
    assert "User=ida" in lines and "WantedBy=multi-user.target" in lines


@pytest.mark.parametrize("user", ["", "root"])
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path, user):
    unit = tmp_path / "barnraise.service"
    unit.write_bytes(render_systemd_unit(dataclasses.replace(SERVICE, user=user)))
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "--system" if user else "--user", "--man=no", "verify", unit],
            capture_output=True,
            text=True,
            env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        about_unit = [line for line in done.stderr.splitlines() if unit.name in line]
        assert done.returncode == 0 and not about_unit, done.stderr
    sections = [line for line in unit.read_text().splitlines() if line.startswith("[")]
    assert sections == ["[Unit]", "[Service]", "[Install]"]


def test_launchd_agent_starts_at_login_and_after_a_crash_alone():
    agent = plistlib.loads(render_launchd_agent(SERVICE))
    assert agent["Label"] == "org.barnraise.barnraise"
    assert agent["ProgramArguments"] == list(SERVICE.command)
    assert agent["EnvironmentVariables"] == SERVICE.environment
    assert agent["RunAtLoad"] and agent["KeepAlive"] == {"SuccessfulExit": False}
    assert (agent["Nice"], agent["LowPriorityIO"], agent["ThrottleInterval"]) == (19, True, 60)


def test_scheduled_task_starts_at_log_on_with_a_low_priority():
    text = render_scheduled_task(dataclasses.replace(SERVICE, user="PC\\Ida & Bo"))
    task = ElementTree.fromstring(text)
    namespace = {"t": TASK_NAMESPACE}

    def value(path: str) -> str | None:
        return task.findtext(path, namespaces=namespace)

    assert value("t:Triggers/t:LogonTrigger/t:UserId") == "PC\\Ida & Bo"
    assert value("t:Settings/t:Priority") == "7" and value("t:Settings/t:RestartOnFailure/t:Count")
    assert value("t:Settings/t:ExecutionTimeLimit") == "PT0S", "no limit: the default is 3 days"
    assert value("t:Actions/t:Exec/t:Command") == "/bin/sh"
    arguments = value("t:Actions/t:Exec/t:Arguments")
    assert arguments is not None
    assert arguments == subprocess.list2cmdline(SERVICE.command[1:]) and "& <c>" in arguments


def test_states_are_read_from_what_systemd_and_launchd_print():
    running = parse_state("LoadState=loaded\nActiveState=active\n")
    assert running == ServiceState(True, True, False)
    failed = parse_state("LoadState=loaded\nActiveState=failed\n")
    assert failed == ServiceState(True, False, True)
    missing = parse_state("LoadState=not-found\nActiveState=inactive\n")
    assert missing == ServiceState(False)
    text = "gui/501/org.barnraise.barnraise = {\n\tstate = running\n\tpid = 77\n}\n"
    assert parse_state(text) == ServiceState(True, True, False)
    text = "x = {\n\tstate = not running\n\tlast exit code = 1\n}\n"
    assert parse_state(text) == ServiceState(True, False, True)


@pytest.mark.parametrize(
    ("system", "program", "started", "removed"),
    [
        ("linux", "systemctl", "--user enable --now NAME.service", "disable --now NAME.service"),
        ("darwin", "launchctl", "bootstrap gui/", "bootout gui/"),
        ("win32", "schtasks", "/Create /TN NAME /XML ", "/Delete /TN NAME /F"),
    ],
)
def test_each_system_is_called_to_start_and_to_remove(
    tmp_path, monkeypatch, system, program, started, removed
):
    calls = tmp_path / "calls"
    script = tmp_path / program
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    manager, name = choose_manager(tmp_path, system), choose_service_name(tmp_path)
    manager.install(SERVICE)
    assert manager.path.read_bytes() == manager.render(SERVICE)
    assert started.replace("NAME", name) in calls.read_text()
    manager.remove()
    assert removed.replace("NAME", name) in calls.read_text() and not manager.path.exists()


# ---- refusals ----------------------------------------------------------------------------------

LINUX = ServiceFacts(system="linux", home=Mount("/", "ext4"))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({}, ""),
        ({"system": "darwin"}, ""),
        ({"system": "win32", "home": Mount("C:\\", "NTFS", "rw,fixed")}, ""),
        ({"has_systemd": False}, "start `barnraise join RUN` from your login instead"),
        ({"system": "freebsd14", "has_systemd": False}, "systemd does not run here"),
        ({"system": "darwin", "has_systemd": False}, ""),
        ({"is_root": True}, "train with root's rights: run this as your own user"),
        ({"is_root": True, "system": "darwin"}, "run this as your own user"),
        ({"is_root": True, "wants_system": True}, ""),
        ({"wants_system": True}, "which only root may: use sudo"),
        ({"system": "darwin", "wants_system": True}, "--system is for Linux"),
        ({"is_manager_reachable": False}, "your user's systemd does not answer"),
        ({"home": Mount("/media/ida/STICK", "vfat")}, "/media/ida/STICK, where this machine's"),
        ({"home": Mount("/mnt/nas", "nfs4")}, "may not be mounted when the service starts"),
        ({"home": Mount("/run/media/ida/x", "btrfs")}, "may not be mounted"),
        ({"home": Mount("/tmp", "tmpfs")}, "may not be mounted"),
        ({"home": Mount("/data", "ext4")}, "on a drive that always is with --home FOLDER"),
        ({"home": Mount("/data", "ext4"), "boot_mounts": ["/", "/data"]}, ""),
        ({"home": Mount("/tank/ida", "zfs")}, ""),
        ({"system": "darwin", "home": Mount("/Volumes/Stick", "apfs")}, "/Volumes/Stick, where"),
        ({"system": "win32", "home": Mount("E:\\", "FAT", "rw,removable")}, "E:\\, where"),
        ({"system": "win32", "home": Mount("Z:\\", "NTFS", "rw,remote")}, "Z:\\, where"),
        ({"home": None}, ""),
    ],
)
def test_service_is_refused_where_it_cannot_work(facts, sentence):
    refusal = find_refusal(dataclasses.replace(LINUX, **facts))
    assert sentence in refusal and bool(refusal) == bool(sentence)


def test_mounts_at_the_start_are_read_from_the_table():
    table = """
    # a comment
    UUID=1 / ext4 errors=remount-ro 0 1
    UUID=2 /big\\040drive ext4 defaults 0 2
    UUID=3 /backup ext4 noauto,user 0 0   # not at the start
    tmpfs
    """
    assert read_boot_mounts(table) == ["/", "/big drive"]


def test_each_home_has_a_service_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_service_name(tmp_path / ".barnraise") == "barnraise"
    names = {choose_service_name(tmp_path / name) for name in ("a", "b")}
    assert len(names) == 2 and all(name.startswith("barnraise-") for name in names)


# ---- the commands ------------------------------------------------------------------------------


class MemoryManager(ServiceManager):
    """A service manager that starts nothing."""

    installed: ServiceText | None = None
    refuses = False

    def install(self, service: ServiceText) -> None:
        self.path.write_bytes(self.render(service))
        if self.refuses:
            raise StateError("`systemctl enable` failed: no bus")
        type(self).installed = service

    def remove(self) -> None:
        self.path.unlink()
        type(self).installed = None

    def read_state(self) -> ServiceState:
        return ServiceState(is_installed=self.installed is not None)


@pytest.fixture(params=[render_systemd_unit, render_launchd_agent, render_scheduled_task])
def manager(monkeypatch, home, request):
    """Let the commands use a service manager in memory, on a machine that allows services."""
    monkeypatch.setattr(MemoryManager, "installed", None)
    monkeypatch.setattr(MemoryManager, "refuses", False)
    path = home.path / "service.xml"
    memory = MemoryManager(path, request.param, (), (), (), place="a list in memory")
    monkeypatch.setattr(command, "choose_manager", lambda folder, is_system: memory)
    monkeypatch.setattr(command, "gather_facts", lambda *facts: LINUX)
    return MemoryManager


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return StateDir(tmp_path)


@pytest.fixture
def site(home):
    with closing(TrainingSite(home)) as training_site:
        yield training_site


def test_install_names_the_runs_and_remove_leaves_nothing(site, home, manager, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("SECRET_OF_SOMETHING_ELSE", "x")
    output = invoke("service", "install", "one", "two", "--share", "70,30", "--device", "cpu")
    assert "trains Run one, Run two" in output and "starts when you log in" in output
    options = ("--share", "70,30", "--device", "cpu", "--home", str(home.path))
    assert manager.installed.command[3:] == ("service", "run", *RUNS.values(), *options)
    assert manager.installed.environment["https_proxy"] == "http://proxy:3128"
    assert "SECRET_OF_SOMETHING_ELSE" not in manager.installed.environment
    with pytest.raises(StateError, match=r"installed already \(a list in memory\)"):
        invoke("service", "install", "one")
    shown = " ".join(invoke("service", "status").split())
    assert "stopped" in shown and "Starts when you log in" in shown and "next" not in shown
    assert "is removed" in invoke("service", "remove")
    assert manager.installed is None and not list(home.path.glob("service*"))
    for name in ("remove", "status"):
        with pytest.raises(StateError, match="no service is installed here"):
            invoke("service", name)


def test_service_of_the_system_trains_as_the_owner_of_its_home(site, home, manager, monkeypatch):
    with pytest.raises(StateError, match="only root may: use sudo"):
        invoke("service", "install", "one", "--system")
    root = dataclasses.replace(LINUX, is_root=True)
    monkeypatch.setattr(command, "gather_facts", lambda *facts: root)
    with pytest.raises(StateError, match="with --system, which trains as the user"):
        invoke("service", "install", "one")
    invoke("service", "install", "one", "--system")
    assert manager.installed.user == home.path.owner()


def test_install_without_a_run_takes_the_one_that_was_trained_last(site, home, manager):
    with pytest.raises(StateError, match="no run is named"):
        invoke("service", "install")
    for slug, at in (("one", 100.0), ("two", 200.0)):
        status = {"at": at, "activity": "left", "name": slug}
        (home.path / "runs" / RUNS[slug] / "status.json").write_text(json.dumps(status))
    invoke("service", "install")
    assert RUNS["two"] in manager.installed.command and RUNS["one"] not in manager.installed.command
    assert "Runs two" in " ".join(invoke("service", "status").split())


def test_install_with_next_alone_takes_an_open_run(site, home, manager):
    invoke("service", "install", "--next")
    assert RUNS["one"] in manager.installed.command
    assert "then the site's next open run" in invoke("service", "status")


def test_install_refuses_an_ended_run_and_a_running_worker(site, home, manager):
    site.statuses["one"] = RunStatus.FINISHED
    with pytest.raises(RunEndedError, match="is finished"):
        invoke("service", "install", "one")
    with (
        other_worker(home.path / "runs" / RUNS["two"]),
        pytest.raises(StateError, match="trains on this machine"),
    ):
        invoke("service", "install", "two")
    assert not list(home.path.glob("service*")) and manager.installed is None


def test_install_that_the_system_refuses_leaves_nothing(site, home, manager, monkeypatch):
    monkeypatch.setattr(manager, "refuses", True)
    with pytest.raises(StateError, match="no bus"):
        invoke("service", "install", "one")
    assert not list(home.path.glob("service*"))


def test_service_whose_run_has_ended_says_so_and_stops(site, home):
    site.statuses["one"] = RunStatus.FINISHED
    result = run_barnraise(home.path, "service", "run", RUNS["one"])
    assert result.returncode == 0, "another start would only repeat it"
    log = invoke("service", "logs")
    assert "is finished: there is nothing to train" in log and "the service stops" in log


def test_service_that_reaches_no_site_fails_and_is_started_again(site, home):
    site.close()
    # A site that restarts has ten minutes otherwise.
    code = "from barnraise.training import join; join.SITE_WAIT_SECONDS = 0.0; "
    code += "from barnraise.cli.main import main; main()"
    done = run_python(code, "service", "run", "unheard-of")
    assert done.returncode == 1
    assert "does not answer" in invoke("service", "logs")


def test_command_of_the_system_that_fails_is_quoted():
    with pytest.raises(StateError, match=r"`ls /nowhere/at/all` failed: .*No such file"):
        call_system("ls", "/nowhere/at/all")
    with pytest.raises(StateError, match="`barnraise-nonsense` failed"):
        call_system("barnraise-nonsense")


def test_install_without_a_systemd_says_why_and_installs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nothing")
    result = run_barnraise(tmp_path, "service", "install", "one")
    assert_fails(result, "instead" if result.stderr.count("instead") else "own user")
    assert not list(tmp_path.glob("service*"))


@pytest.mark.integration
def test_real_service_trains_returns_after_a_kill_and_is_removed(tmp_path):
    """Where no systemd of a user can be had, the real command says so."""
    if not can_run_services():
        assert_fails(run_barnraise(tmp_path, "service", "install", "one"), "")
        return
    seen = drill_service()
    assert seen.returned_seconds < 300 and seen.was_niced and seen.ended_in_order
    assert not seen.files_left
