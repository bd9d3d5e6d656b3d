"""Processes that the demo starts: none is left behind, whatever happens to the demo."""

import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from barnraise.protocol.mirror_list import parse_list
from coordinator.demo.mirrors import CELERY, DemoMirror, build_mirror_list, common_state_hash
from coordinator.demo.processes import ProcessGroup, free_port

SLEEP = ("-c", "import time; time.sleep(60)")


def test_stop_ends_every_child(tmp_path):
    family = ProcessGroup(tmp_path)
    children = [family.start(f"child-{n}", sys.executable, *SLEEP) for n in range(2)]
    family.stop()
    assert all(child.poll() is not None for child in children) and not family.children


def test_stop_ends_descendants_of_a_killed_child(tmp_path):
    family = ProcessGroup(tmp_path)
    forks = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, *{SLEEP!r}]); "
        "print(child.pid, flush=True); " + SLEEP[1]
    )
    child = family.start("parent", sys.executable, "-c", forks)
    while not (said := (tmp_path / "parent.log").read_text().strip()):
        time.sleep(0.05)
    child.kill()
    child.wait()
    family.stop()
    orphan = psutil.Process(int(said)) if psutil.pid_exists(int(said)) else None
    assert orphan is None or orphan.status() == psutil.STATUS_ZOMBIE or orphan.wait(5) is None


def test_a_child_that_fails_is_named_with_its_last_words(tmp_path):
    family = ProcessGroup(tmp_path)
    family.start("clumsy", sys.executable, "-c", "print('so long'); raise SystemExit(3)").wait(20)
    assert family.failed_process() == "clumsy"
    assert "so long" in family.log_tail("clumsy")


def test_group_ends_orphans_of_a_killed_group(tmp_path):
    script = f"""
        import os, signal, sys
        sys.path.insert(0, "platform")
        from django.conf import settings
        settings.configure(ROOT=__import__("pathlib").Path.cwd())
        from coordinator.demo.processes import ProcessGroup
        family = ProcessGroup(__import__("pathlib").Path({str(tmp_path)!r}))
        child = family.start("orphan", sys.executable, *{SLEEP!r})
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    orphan = psutil.Process(int(done.stdout))
    assert orphan.is_running()
    ProcessGroup(tmp_path)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_the_next_free_port_is_found():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) > port


@pytest.mark.parametrize("tokens", ["10", "-1"])
def test_a_demo_of_too_few_tokens_is_refused_with_a_sentence(tokens):
    from django.core.management import CommandError, call_command

    with pytest.raises(CommandError, match="must be 1,000 or more"):
        call_command("demo", tokens=int(tokens))


@pytest.mark.parametrize("mirrors", [0, 10])
def test_a_demo_of_no_mirrors_or_of_too_many_is_refused_with_a_sentence(mirrors):
    from django.core.management import CommandError, call_command

    with pytest.raises(CommandError, match="must be between 1 and 9"):
        call_command("demo", mirrors=mirrors)


def test_list_is_renewed_only_if_mirrors_moved_to_other_ports(tmp_path):
    first, second = (DemoMirror(tmp_path / name, name, 9000 + n) for n, name in enumerate("ab"))
    made = build_mirror_list(tmp_path, [first, second])
    before = parse_list(made)
    assert before.version == 1 and len(made.signatures) == 1
    assert build_mirror_list(tmp_path, [first, second], before) is None, "it says so already"
    moved = DemoMirror(tmp_path / "b", "b", 9100)
    after = parse_list(build_mirror_list(tmp_path, [first, moved], before))
    assert after.version == 2 and after.roots == before.roots
    assert [each.url for each in after.mirrors] == [first.url, moved.url]


def test_two_mirrors_come_up_side_by_side_as_one_and_outlive_each_other(tmp_path):
    tmp_path.chmod(0o755)  # where root runs it, Postgres has a user of its own
    for each in tmp_path.parents[:2]:
        each.chmod(0o755)
    mirrors = [
        DemoMirror(tmp_path / name, f"Mirror {name}", free_port(9200 + 50 * n))
        for n, name in enumerate("ab")
    ]
    first, second = mirrors
    told = tmp_path / "list.json"
    told.write_text(build_mirror_list(tmp_path, mirrors).model_dump_json())
    try:
        for each, how in ((first, ("--publish",)), (second, ("--join", first.url))):
            each.start_servers()
            each.start_setup(*how, "--list", str(told))
        for each in mirrors:
            until(lambda each=each: each.is_set_up() or each.processes.failed_process(), each)
            each.start()
            until(each.fetch_status, each)
        until(lambda: common_state_hash(mirrors), second)
        assert all(each.is_running for each in mirrors)
        second.kill()
        assert not second.is_running and first.fetch_status() and second.fetch_status() is None
        second.start()
        until(lambda: common_state_hash(mirrors), second)
        assert second.processes.children[CELERY].poll() is None
    finally:
        for each in mirrors:
            each.stop()
    assert not [
        each for each in psutil.process_iter(["cwd"]) if str(tmp_path) in (each.info["cwd"] or "")
    ]


def until(done, mirror: DemoMirror, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        said = "\n".join(
            mirror.processes.log_tail(log.stem) for log in mirror.processes.logs.glob("*.log")
        )
        assert time.monotonic() < end, said
        time.sleep(0.2)
    assert not mirror.processes.failed_process(), mirror.processes.log_tail(
        mirror.processes.failed_process()
    )
