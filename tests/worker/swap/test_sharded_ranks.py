"""A mesh of four ranks, ranks that die or hang, and ranks that are not alike."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers.effort import examples
from helpers.paths import ROOT, WORKER
from helpers.worker.plans import bitwise

from barnraise.errors import RankLostError, StateError
from barnraise.swap.sharded import cluster, rank_facts, rank_group, rank_place
from barnraise.swap.sharded.key_value_store import StoreAddress
from barnraise.swap.sharded.rank_group import RankGroup
from barnraise.swap.sharded.rank_place import RankPlace
from barnraise.swap.state_store import StateStore

sys.path.append(str(ROOT / "benchmarks" / "swap"))
from sharded_runs import open_sharded, sharded_plan

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("ranks")]

GPT = replace(bitwise.MODEL, layers=2)
STEPS = examples(15, exhaustive=100)
FOUND_SECONDS = 15.0  # within which a lost rank is noticed


@pytest.fixture(autouse=True)
def one_thread(restored_threads):
    torch.set_num_threads(1)


def test_mesh_of_two_by_two_ranks_follows_the_loss_of_one():
    group = RankGroup.start(["cpu"] * 4)
    try:
        with open_sharded(sharded_plan(GPT, 4, tensor=2), group) as engine:
            found = bitwise.train(engine, STEPS)
            state = {name: value.clone() for name, value in engine.state_dict().items()}
    finally:
        group.close()
    plain = bitwise.open_engine(bitwise.resident_plan(GPT))
    assert found == pytest.approx(bitwise.train(plain, STEPS), rel=1e-5)
    plain.load_state_dict(state)
    assert torch.equal(plain.state_dict()["v.2"], state["v.2"])
    plain.close()


def train_until_found(engine, first):
    """Make a step in which a rank is lost, and check that this is found in time."""
    started = time.monotonic()
    try:
        bitwise.train(engine, 1, first=first)
    finally:
        assert time.monotonic() - started < FOUND_SECONDS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hanging"])
def test_lost_rank_ends_the_step_and_all_ranks(number):
    group = RankGroup.start(["cpu", "cpu"])
    with (
        pytest.raises(RankLostError, match="rank 1"),
        open_sharded(sharded_plan(GPT, 2), group) as engine,
    ):
        bitwise.train(engine, 1)
        os.kill(group.processes[0].pid, number)
        train_until_found(engine, first=1)
    group.close()
    assert group.processes[0].returncode is not None


HANGS_IN_A_STEP = """
import time
from barnraise.swap.sharded import rank
from barnraise.swap.sharded.rank_place import RankPlace
from barnraise.swap.sharded.rank_program import Opcode

class HangingProgram(rank.RankProgram):
    steps = 0

    def execute(self, words, payload):
        self.steps += words[0] == Opcode.APPLY
        if self.steps == 3:
            time.sleep(600)
        return super().execute(words, payload)

rank.RankProgram = HangingProgram
rank.serve_commands(RankPlace.read())
"""


def test_rank_that_hangs_while_it_beats_is_found_by_its_measured_steps():
    group = RankGroup.start(["cpu", "cpu"], ("-c", HANGS_IN_A_STEP))
    with (
        pytest.raises(RankLostError, match="have not done their part of a step in 10 seconds"),
        open_sharded(sharded_plan(GPT, 2), group) as engine,
    ):
        bitwise.train(engine, 2)
        train_until_found(engine, first=2)
    group.close()


@pytest.fixture
def place():
    """Return rank 0's place of two, whose store this process serves."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield RankPlace(0, 2, torch.device("cpu"), StoreAddress("127.0.0.1", store.port))
    del store


def test_ranks_that_are_not_alike_are_refused_on_both_sides(place):
    code = (
        "from barnraise.swap.sharded.rank import serve_commands\n"
        "from barnraise.swap.sharded.rank_place import RankPlace\n"
        "serve_commands(RankPlace.read(), 'another run')"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(WORKER)} | replace(place, rank=1).to_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(StateError, match="rank 1 has another run, or other options"):
        RankGroup(place, "this run")
    assert "all ranks must be alike" in other.communicate(timeout=60)[1]


def test_variables_of_torch_suffice_without_torchrun(place, monkeypatch):
    """Rank 0 serves the store then, and opens its engines on the ranks of the cluster."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    first = replace(place, address=StoreAddress("127.0.0.1", port))
    for name, value in first.to_environment().items():
        monkeypatch.setenv(name, value)
    environment = {"PYTHONPATH": str(WORKER)} | replace(first, rank=1).to_environment()
    command = [sys.executable, "-m", rank_group.RANK_MODULE]
    other = subprocess.Popen(command, env=os.environ | environment)
    plan = sharded_plan(GPT, 2)
    with cluster.lead_cluster(""):
        for _ in range(2):
            store = StateStore(plan)
            engine = cluster.open_sharded_engine(
                plan, bitwise.RECIPE, store, bitwise.HeaderRecorder(), None
            )
            assert bitwise.train(engine, 1)
            engine.close()
    assert other.wait(30) == 0


SENDER_OF_ZEROS = """
import time, torch, torch.distributed as dist
from barnraise.swap.sharded import rank_place
from barnraise.swap.sharded.heartbeat import Heartbeat
from barnraise.swap.sharded.rank_facts import collect_facts

place = rank_place.RankPlace.read()
store = place.find_others(collect_facts(place.device, ""))
beats = Heartbeat(place.address, 1, 2)
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
parts = [torch.zeros(rank_place.TRIAL_SIZE) for _ in range(2)]
dist.all_gather(parts, torch.zeros(rank_place.TRIAL_SIZE))
time.sleep(60)
"""


def test_collective_that_returns_zeros_is_noticed_at_the_start(place, monkeypatch):
    monkeypatch.setattr(rank_group, "DEAD_SECONDS", 0.0)
    monkeypatch.setattr(rank_group, "END_SECONDS", 0.5)
    environment = {"PYTHONPATH": str(WORKER)} | replace(place, rank=1).to_environment()
    other = subprocess.Popen([sys.executable, "-c", SENDER_OF_ZEROS], env=os.environ | environment)
    with pytest.raises(RankLostError, match="what rank 1 sent to rank 0 came as other numbers"):
        RankGroup(place)
    other.kill()
    other.wait()


@pytest.mark.parametrize("fact", list(rank_facts.FACTS))
def test_each_fact_that_differs_is_named(place, fact):
    facts = rank_facts.collect_facts(place.device, "a run")
    store = place.address.connect(5)
    store.set("facts/1", json.dumps(facts | {fact: "something else"}))
    with pytest.raises(StateError, match=r"rank 1 has another .*something else"):
        place.find_others(facts)


def test_rank_that_does_not_come_is_named_in_time(place, monkeypatch):
    monkeypatch.setattr(rank_facts, "REACH_SECONDS", 1.0)
    with pytest.raises(StateError, match="rank 1 of 2 has not answered within 1 s"):
        RankGroup(place)


def test_store_that_is_not_there_is_refused_in_time(place, monkeypatch):
    monkeypatch.setattr(rank_place, "REACH_SECONDS", 1.0)
    nowhere = replace(place, rank=1, address=StoreAddress("127.0.0.1", 1))
    with pytest.raises(StateError, match="rank 1 does not reach 127"):
        nowhere.find_others({})


def test_environment_without_a_rank_is_refused():
    with pytest.raises(StateError, match="start all ranks with torchrun"):
        RankPlace.read({"RANK": "1"})
