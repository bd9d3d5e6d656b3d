"""Processes that the demo starts: none is left behind, whatever happens to the demo."""

import subprocess
import sys
import textwrap

import psutil
import pytest

from coordinator.demo.processes import Family, free_port

SLEEP = ("-c", "import time; time.sleep(60)")


def test_stop_ends_every_child(tmp_path):
    family = Family(tmp_path)
    children = [family.start(f"child-{n}", sys.executable, *SLEEP) for n in range(2)]
    family.stop()
    assert all(child.poll() is not None for child in children) and not family.children


def test_a_child_that_fails_is_named_with_its_last_words(tmp_path):
    family = Family(tmp_path)
    family.start("clumsy", sys.executable, "-c", "print('so long'); raise SystemExit(3)").wait(20)
    assert family.died() == "clumsy"
    assert "so long" in family.last_words("clumsy")


def test_a_family_ends_what_one_that_was_killed_left_behind(tmp_path):
    script = f"""
        import os, signal, sys
        sys.path.insert(0, "platform")
        from django.conf import settings
        settings.configure(ROOT=__import__("pathlib").Path.cwd())
        from coordinator.demo.processes import Family
        child = Family(__import__("pathlib").Path({str(tmp_path)!r})).start("orphan", sys.executable, *{SLEEP!r})
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    orphan = psutil.Process(int(done.stdout))
    assert orphan.is_running()
    Family(tmp_path)
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
