"""Test the demo's processes: none is left behind, whatever happens to the demo."""

import json
import subprocess
import sys
import threading
import time

import psutil
import pytest
from helpers import wait_for
from helpers.paths import ROOT
from helpers.python_code import run_python

from barnraise.protocol.mirror_list import parse_list
from coordinator.demo import processes
from coordinator.demo.mirrors import (
    CELERY,
    SERVERS,
    DemoMirror,
    build_mirror_list,
    common_state_hash,
)
from coordinator.demo.processes import ProcessGroup
from coordinator.lib.embedded import embedded_servers
from coordinator.lib.free_ports import free_port

SLEEP = ("-c", "import time; time.sleep(60)")


def test_stop_ends_every_child(tmp_path):
    group = ProcessGroup(tmp_path)
    children = [group.start(f"child-{n}", sys.executable, *SLEEP) for n in range(2)]
    group.stop()
    assert all(child.poll() is not None for child in children) and not group.children


def test_stop_ends_descendants_of_a_killed_child(tmp_path):
    group = ProcessGroup(tmp_path)
    forks = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, *{SLEEP!r}]); "
        "print(child.pid, flush=True); " + SLEEP[1]
    )
    child = group.start("parent", sys.executable, "-c", forks)
    log = tmp_path / "parent.log"
    while not log.read_text().strip():
        time.sleep(0.05)
    output = log.read_text().strip()
    child.kill()
    child.wait()
    group.stop()
    orphan = psutil.Process(int(output)) if psutil.pid_exists(int(output)) else None
    assert orphan is None or orphan.status() == psutil.STATUS_ZOMBIE or orphan.wait(5) is None


def test_logs_are_bounded_while_their_process_writes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 1000)
    group = ProcessGroup(tmp_path)
    talker = (
        "import time\nfor n in range(100): print(f'{n:03}' * 400, flush=True); time.sleep(0.05)"
    )
    child = group.start("talker", sys.executable, "-c", talker)
    log = tmp_path / "talker.log"
    for _ in range(4):
        wait_for.wait_until(lambda: log.stat().st_size > 1000)
        group.bound_logs()
    wait_for.wait_until(lambda: log.stat().st_size > 0)
    assert not log.read_bytes().startswith(b"\0"), "it continues at the start of the file"
    names = {path.name for path in tmp_path.glob("talker.log*")}
    assert names == {"talker.log", "talker.log.1", "talker.log.2"}
    assert child.poll() is None
    group.stop()
    group.start("talker", sys.executable, "-c", "print('again')").wait(20)
    assert log.read_text() == "again\n"


def test_failed_child_is_named_and_its_log_is_readable(tmp_path):
    group = ProcessGroup(tmp_path)
    group.start("clumsy", sys.executable, "-c", "print('a last line'); raise SystemExit(3)").wait(
        20
    )
    assert group.failed_process() == "clumsy"
    assert "a last line" in group.log_tail("clumsy")


START_AND_DIE = """
import os, signal, sys
from pathlib import Path
from coordinator.demo.processes import ProcessGroup
child = ProcessGroup(Path(sys.argv[1])).start("orphan", *sys.argv[2:])
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def start_and_die(folder) -> int:
    """Start a child in a process that is killed then, and return the child's pid."""
    return int(run_python(START_AND_DIE, folder, sys.executable, *SLEEP, cwd=ROOT).stdout)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of the killed")
def test_children_of_a_killed_process_end_with_it(tmp_path):
    pid = start_and_die(tmp_path)
    wait_for.wait_until(lambda: has_ended(pid))


def test_group_ends_orphans_of_a_killed_group(tmp_path):
    orphan = subprocess.Popen([sys.executable, *SLEEP])
    started = psutil.Process(orphan.pid).create_time()
    (tmp_path / "children.json").write_text(json.dumps([(orphan.pid, started)]))
    ProcessGroup(tmp_path)
    assert has_ended(orphan.pid)
    orphan.wait()  # which reaps it


def test_children_outlive_the_thread_that_started_them(tmp_path):
    group = ProcessGroup(tmp_path)
    starter = threading.Thread(target=group.start, args=("child", sys.executable, *SLEEP))
    starter.start()
    starter.join()
    started = group.start("later", sys.executable, "-c", "")  # after the thread has ended
    assert started.wait(20) == 0 and group.children["child"].poll() is None
    group.stop()


def test_child_that_has_ended_already_can_be_killed(tmp_path):
    group = ProcessGroup(tmp_path)
    group.start("brief", sys.executable, "-c", "").wait(20)
    group.kill("brief")
    assert not group.children


@pytest.mark.parametrize("tokens", ["10", "-1"])
def test_demo_with_too_few_tokens_is_refused(tokens):
    from django.core.management import CommandError, call_command

    with pytest.raises(CommandError, match="must be 1,000 or more"):
        call_command("demo", tokens=int(tokens))


@pytest.mark.parametrize("mirrors", [0, 10])
def test_demo_with_invalid_mirror_count_is_refused(mirrors):
    from django.core.management import CommandError, call_command

    with pytest.raises(CommandError, match="must be between 1 and 9"):
        call_command("demo", mirrors=mirrors)


@pytest.mark.django_db
def test_second_start_of_the_demo_continues_its_unfinished_run(person, draft):
    from coordinator.demo.management.commands.demo import find_unfinished

    owner = person()
    draft(owner, "Another run")
    assert find_unfinished(owner) is None
    older, newer = draft(owner, "Demo"), draft(owner, "Demo 2")
    assert find_unfinished(owner) == newer
    newer.cancel()
    assert find_unfinished(owner) == older


def test_list_is_renewed_only_if_mirrors_moved_to_other_ports(tmp_path):
    first, second = (DemoMirror(tmp_path / name, name, 9000 + n) for n, name in enumerate("ab"))
    signed = build_mirror_list(tmp_path, [first, second])
    before = parse_list(signed)
    assert before.version == 1 and len(signed.signatures) == 1
    assert build_mirror_list(tmp_path, [first, second], before) is None, (
        "an unchanged list was renewed"
    )
    moved = DemoMirror(tmp_path / "b", "b", 9100)
    after = parse_list(build_mirror_list(tmp_path, [first, moved], before))
    assert after.version == 2 and after.roots == before.roots
    assert [entry.url for entry in after.mirrors] == [first.url, moved.url]


def test_setup_waits_until_the_process_of_the_servers_has_the_folder(tmp_path):
    mirror = DemoMirror(tmp_path / "a", "a", 9000)
    assert not mirror.has_servers_of_its_own()
    lock = embedded_servers.claim(mirror.folder)
    assert mirror.has_servers_of_its_own()
    lock.release()
    mirror.supervise(SERVERS, "-c", "raise SystemExit('no room for Postgres')")
    with pytest.raises(RuntimeError, match="no room for Postgres"):
        mirror.start_setup("--publish")
    mirror.stop()


@pytest.mark.slow  # test_second_mirror_joins_and_each_works_while_the_other_is_dead is quicker
def test_two_demo_mirrors_agree_and_survive_each_other(public_folder):
    mirrors = [
        DemoMirror(public_folder / name, f"Mirror {name}", free_port(9200 + 50 * n))
        for n, name in enumerate("ab")
    ]
    first, second = mirrors
    list_path = public_folder / "list.json"
    list_path.write_text(build_mirror_list(public_folder, mirrors).model_dump_json())
    try:
        for mirror, mode in ((first, ("--publish",)), (second, ("--join", first.url))):
            mirror.start_servers()
            mirror.start_setup(*mode, "--list", str(list_path))
        for mirror in mirrors:
            wait_until(
                lambda mirror=mirror: mirror.is_set_up() or mirror.processes.failed_process(),
                mirror,
            )
            mirror.start()
            wait_until(mirror.fetch_status, mirror)
        wait_until(lambda: common_state_hash(mirrors), second)
        assert all(mirror.is_running for mirror in mirrors)
        second.kill()
        assert not second.is_running and first.fetch_status() and second.fetch_status() is None
        second.start()
        wait_until(lambda: common_state_hash(mirrors), second)
        assert second.processes.children[CELERY].poll() is None
    finally:
        for mirror in mirrors:
            mirror.stop()
    wait_until(lambda: not processes_in(public_folder), first)


def processes_in(folder):
    return [
        process
        for process in psutil.process_iter(["cwd"])
        if str(folder) in (process.info["cwd"] or "")
    ]


def wait_until(condition, mirror: DemoMirror, seconds: float = 600.0) -> None:
    """Wait until a condition holds; fail with the mirror's logs after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(
            mirror.processes.log_tail(log.stem) for log in mirror.processes.logs.glob("*.log")
        )
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)
    assert not mirror.processes.failed_process(), mirror.processes.log_tail(
        mirror.processes.failed_process()
    )
