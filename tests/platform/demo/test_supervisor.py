"""Test that children are started again when they end, and that a hopeless one stops everything."""

import logging
import os
import signal
import sys
from collections import Counter

import pytest
from helpers.wait_for import wait_until

from coordinator.demo import restart_policy
from coordinator.demo.processes import ChildCommand
from coordinator.demo.supervisor import RestartCounter, Supervisor, describe_end
from coordinator.lib import counters
from coordinator.lib.embedded import embedded_servers, valkey_server

WAIT = ChildCommand(("sleep", "60"))
FAIL = ChildCommand((sys.executable, "-c", "print('no such table'); raise SystemExit(3)"))


@pytest.fixture
def group(tmp_path):
    """Yield a supervisor and stop its children at the end."""
    supervised = Supervisor(tmp_path)
    yield supervised
    supervised.stop()


@pytest.fixture
def impatient(monkeypatch):
    """Let restarts follow each other quickly."""
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_SECONDS", 0.01)


def test_killed_child_is_started_again_with_its_cause_in_the_log(group, caplog):
    first = group.supervise("sleeper", WAIT)
    with caplog.at_level(logging.WARNING):
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: group.restarts["sleeper"] == 1)
    assert group.running_pid("sleeper") not in (None, first.pid)
    assert "sleeper was ended by SIGKILL and is started again in 0.2 s" in caplog.text
    assert group.failed_process() is None


def test_child_that_always_fails_stops_everything_with_a_sentence(group, impatient):
    healthy = group.supervise("healthy", WAIT)
    group.supervise("hopeless", FAIL)
    wait_until(lambda: group.failure and not group.children)
    assert group.failure.startswith("hopeless ended 5 times within 60 seconds")
    assert "exited with code 3" in group.failure and "no such table" in group.failure
    assert group.restarts == {"hopeless": 4}
    healthy.wait(60)


def test_orderly_end_of_a_child_counts_as_well(group, impatient):
    group.supervise("brief", ChildCommand(("true",)))
    wait_until(lambda: group.failure)
    assert "exited with code 0" in group.failure


def test_child_that_was_stopped_or_killed_on_purpose_stays_down(group):
    for name in ("stopped", "killed", "other"):
        group.supervise(name, WAIT)
    group.stop("stopped")
    group.kill("killed")
    os.kill(group.children["other"].pid, signal.SIGKILL)
    wait_until(lambda: group.restarts["other"] == 1)
    assert group.restarts == Counter(other=1)
    assert group.supervised_names() == ["other"]


def test_child_waits_while_something_outside_prevents_its_start(group, impatient, caplog):
    reasons = ["the disk is full"]
    process = group.supervise("server", WAIT, lambda: "".join(reasons))
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: "server is not started yet: the disk is full" in caplog.text)
    assert not group.restarts and not group.failure
    reasons.clear()
    wait_until(lambda: group.restarts["server"] == 1)
    assert caplog.text.count("is not started yet") == 1


def test_servers_are_stopped_after_those_who_need_them(group):
    """The client writes its last line at SIGTERM, and finds the server alive."""
    server = group.supervise("server", ChildCommand(("sleep", "60"), is_server=True))
    code = (
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (os.kill({server.pid}, 0), sys.exit(7)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    client = group.supervise("client", ChildCommand((sys.executable, "-c", code)))
    wait_until(lambda: "ready" in group.log_tail("client"))
    group.stop()
    assert client.returncode == 7 and server.returncode == -signal.SIGTERM


def test_restarts_are_counted_once_valkey_answers(valkey, state, settings):
    counter = RestartCounter(settings.REDIS_URL)
    valkey_server.stop_valkey(state)
    try:
        counter.add("celery")
        counter.publish()
    finally:
        embedded_servers.start(state, durable=False)
    counter.publish()
    counter.publish()
    assert valkey.hget(counters.KEY, 'barnraise_restarts_total{process="celery"}') == "1"
    assert 'barnraise_restarts_total{process="celery"} 1' in "\n".join(counters.exposition())


def test_end_is_described_by_signal_or_code():
    assert describe_end(-9) == "was ended by SIGKILL"
    assert describe_end(-250) == "was ended by signal 250"
    assert describe_end(1) == "exited with code 1"
