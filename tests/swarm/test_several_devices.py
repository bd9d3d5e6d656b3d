"""Workers on several devices: windows of RAM. The planner uses those that help."""

from dataclasses import replace

import pytest
from example_hardware import ONE_CORE_MACHINE

from barnraise.errors import PlanError
from barnraise.planning.limits import Limits

TWO_WINDOWS = replace(ONE_CORE_MACHINE, others=(ONE_CORE_MACHINE,))
WINDOW = Limits(device_memory=200_000_000)


def test_worker_on_two_devices_agrees_with_one_on_one_device(swarm, caplog):
    run = swarm(token_budget=24_000, round_steps=5)
    run.set_machine("ben", TWO_WINDOWS)
    one = run.start("ada", knows=["ben"])
    two = run.start("ben", knows=["ada"], limits=WINDOW)
    assert len(two.worker.plan.devices) == 2 and not one.worker.plan.devices
    run.join_in_agreement(one, two, seconds=120)
    assert two.status["updates_sent"] > 0 and two.status["device"] == "cpu, cpu"
    assert "2 windows of RAM, fed from one copy" in two.status["plan"]["sentence"]
    assert two.status["plan"]["device"].startswith("2 × ") and "not chosen: " in caplog.text


@pytest.mark.slow  # the engine's tests have the bits
@pytest.mark.parametrize("accumulation", [1, 4])
def test_machines_that_average_train_on_two_devices(swarm, accumulation):
    run = swarm(
        strategy="decentralized-adam", token_budget=30_000, mixing_accumulation=accumulation
    )
    run.set_machine("ben", TWO_WINDOWS)
    pair = [run.start("ada", knows=["ben"]), run.start("ben", knows=["ada"], limits=WINDOW)]
    assert len(pair[1].worker.plan.devices) == 2
    run.join_in_agreement(*pair)
    assert pair[1].worker.mixing.counts.messages > 0


def test_ranks_do_not_average_weights_with_other_machines(swarm):
    run = swarm(strategy="decentralized-adam")
    run.set_machine("ada", TWO_WINDOWS)
    with pytest.raises(PlanError, match="average their weights in every step"):
        run.start("ada", limits=Limits(engine="sharded"))


def test_saved_state_moves_between_one_device_and_two(swarm):
    run = swarm(token_budget=10_000_000, round_steps=3)
    steps = 0
    for machine in (ONE_CORE_MACHINE, TWO_WINDOWS, ONE_CORE_MACHINE):
        run.set_machine("ada", machine)
        worker = run.start("ada", limits=WINDOW)
        run.until(lambda worker=worker, steps=steps: worker.status.get("step", 0) > steps + 5)
        assert worker.worker.engine.progress.optimizer_steps > steps
        steps = worker.status["step"]
        worker.leave()
