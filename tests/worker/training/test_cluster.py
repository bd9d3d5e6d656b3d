"""`barnraise join --engine sharded` on ranks of this machine, and on those that torchrun starts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psutil
import pytest
from helpers.paths import WORKER
from helpers.worker.command_line import assert_fails
from helpers.worker.training_site import RUNS, TrainingSite

from barnraise.state_dir import StateDir
from barnraise.swap.sharded.rank_group import RANK_MODULE
from barnraise.training.checkpoint import CheckpointSlots

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("ranks")]

PATIENCE_SECONDS = 120.0  # other programs may use the machine
JOIN = ("-m", "barnraise", "join", "one", "--eager", "--threads", "1", "--engine", "sharded")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def site(tmp_path):
    with closing(TrainingSite(StateDir(tmp_path / "home"))) as training_site:
        yield training_site


@contextmanager
def started(tmp_path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start Python with the site's machine as its home, and end all of its processes."""
    environment = os.environ | {
        "PYTHONPATH": str(WORKER),
        "BARNRAISE_HOME": str(tmp_path / "home"),
        "BARNRAISE_SAME_CARD": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,  # which gets the priority of idle programs
        )
        try:
            yield process
        finally:
            is_there = process.poll() is None
            family = psutil.Process(process.pid).children(recursive=True) if is_there else []
            process.kill()
            process.wait()
            for child in family:
                child.kill()


def wait_until(is_true, process, tmp_path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        said = (tmp_path / "log").read_text()
        assert process.poll() is None and time.monotonic() < deadline, said
        time.sleep(0.2)


def saved_tokens(tmp_path) -> int:
    header = CheckpointSlots(tmp_path / "home" / "runs" / RUNS["one"] / "checkpoint").header
    return header.tokens if header else 0


def ranks_of(process: "subprocess.Popen[str]", words: str) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if words in " ".join(child.cmdline())
    ]


def test_worker_starts_ranks_and_goes_on_when_one_dies(site, tmp_path):
    with started(tmp_path, *JOIN, "--devices", "cpu,cpu") as worker:
        wait_until(lambda: saved_tokens(tmp_path) > 0, worker, tmp_path)
        (rank,) = ranks_of(worker, RANK_MODULE)
        session, tokens = site.sessions["one"], saved_tokens(tmp_path)
        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: site.is_training("one", session), worker, tmp_path)
        wait_until(lambda: saved_tokens(tmp_path) > tokens, worker, tmp_path)
        said = (tmp_path / "log").read_text()
        assert "rank 1 has not answered for 10 seconds" in said, said
        assert "restart 1 of 3 within an hour" in said and not rank.is_running()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    view = site.last_reports["one"].plan
    assert view is not None and "on 2 processes, each with a part of the state" in view.sentence


@pytest.mark.slow  # worker/swap's tests open engines on a cluster's ranks without torchrun
def test_torchrun_trains_as_one_machine_and_starts_again(site, tmp_path):
    with started(tmp_path, *TORCHRUN, "--max-restarts", "1", *JOIN) as cluster:
        wait_until(lambda: saved_tokens(tmp_path) > 0, cluster, tmp_path)
        said = (tmp_path / "log").read_text()
        assert "gloo and NCCL neither encrypt nor verify" in said
        assert "all 2 ranks have joined" in said
        session, tokens = site.sessions["one"], saved_tokens(tmp_path)
        other = next(
            rank for rank in ranks_of(cluster, "barnraise join") if rank.environ()["RANK"] == "1"
        )
        other.kill()
        wait_until(lambda: site.is_training("one", session), cluster, tmp_path)
        wait_until(lambda: saved_tokens(tmp_path) > tokens, cluster, tmp_path)
        cluster.send_signal(signal.SIGTERM)
        cluster.wait(60)
    assert saved_tokens(tmp_path) > tokens


def test_torchrun_without_the_sharded_engine_is_refused(site, tmp_path):
    done = subprocess.run(
        [sys.executable, *JOIN[:5]],
        env=os.environ
        | {"PYTHONPATH": str(WORKER), "BARNRAISE_HOME": str(tmp_path / "home")}
        | {"RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert_fails(done, "torchrun has started 2 processes")
    assert "add --engine sharded" in done.stderr
