"""Workers that average the gradients of every step; no coordinator answers."""

from hashlib import sha256

import pytest

from barnraise.training.local_control import LocalControl

PAIR = ["ada", "ben"]
TRIO = [*PAIR, "cleo"]


def other_names(name: str) -> list[str]:
    return [n for n in TRIO if n != name]


def record_group_sizes(volunteer) -> list[int]:
    """Return a list to which the size of a volunteer's group is added in each of its steps."""
    sizes: list[int] = []
    engine, take_step = volunteer.worker.engine, volunteer.worker.engine.step

    def record(*arguments):
        stats = take_step(*arguments)
        group = volunteer.worker.groups.group
        sizes.append(0 if stats.interrupted or group is None else group.size)
        return stats

    engine.step = record
    return sizes


def record_replicas(volunteer) -> dict[int, str]:
    """Return a dictionary that receives the digest of a volunteer's replica before each step."""
    replicas: dict[int, str] = {}
    engine, take_step = volunteer.worker.engine, volunteer.worker.engine.step

    def record(*arguments):
        taken = engine.progress_with_pending.optimizer_steps
        replicas[taken] = sha256(engine.read_replica().numpy().tobytes()).hexdigest()
        return take_step(*arguments)

    engine.step = record
    return replicas


def test_machines_that_average_gradients_train_one_model_and_finish(swarm):
    run = swarm(strategy="all-reduce", token_budget=10_000)
    pair = [run.start(name, knows=other_names(name)) for name in PAIR]
    for volunteer in pair:
        volunteer.join(180)
    assert len({(v.status["vector"], v.status["anchor"]) for v in pair}) == 1
    first, last = (pair[0].status[f"validation_{each}"] for each in ("first", "last"))
    assert last[0] >= 10_000 and last[1] < first[1] - 0.1, "the published model has learnt"
    assert all(v.status["updates_sent"] > 0 and v.status["tokens"] > 0 for v in pair)


@pytest.mark.slow  # groups, their decisions and averaged steps have tests of their own
def test_machine_that_vanishes_and_returns_continues_with_the_others(swarm):
    run = swarm(strategy="all-reduce", token_budget=10_000_000)
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    run.until(lambda: all(v.status.get("step", 0) > 3 for v in trio), 180)
    sizes = record_group_sizes(trio[0])
    run.until(lambda: 3 in sizes[-3:], 180)

    # One vanishes: the others go on.
    trio[1].kill()
    run.until(lambda: sizes[-3:] == [2, 2, 2], 180)

    # It returns with its old state, and continues with the others' weights, moments and step.
    back = run.start("ben", knows=other_names("ben"))
    run.until(lambda: sizes[-3:] == [3, 3, 3], 180)

    # One is paused: the others go on without it, and with it afterwards.
    control = LocalControl(trio[2].worker.joined.folder.path)
    control.pause()
    run.until(lambda: sizes[-3:] == [2, 2, 2], 180)
    control.resume()
    run.until(lambda: sizes[-3:] == [3, 3, 3], 180)

    # Weights have the same bits on all machines.
    replicas = [record_replicas(volunteer) for volunteer in (trio[0], back, trio[2])]
    run.until(lambda: len(set.intersection(*map(set, replicas))) > 5, 180)
    common = set.intersection(*map(set, replicas))
    assert all(len({each[step] for each in replicas}) == 1 for step in common)
