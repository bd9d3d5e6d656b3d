"""Workers that average their weights in every step; no coordinator answers."""

from dataclasses import replace

import pytest

from barnraise.mixing import neighbour_mixing
from barnraise.mixing.neighbour_mixing import Patience
from barnraise.training import pauses
from barnraise.training.local_control import LocalControl

PAIR = ["ada", "ben"]
TRIO = [*PAIR, "cleo"]


def other_names(name: str) -> list[str]:
    return [n for n in TRIO if n != name]


def test_machines_that_average_train_one_model_and_finish(swarm):
    run = swarm(strategy="decentralized-adam", mixing_bits=16, token_budget=50_000)
    pair = [run.start(name, knows=other_names(name)) for name in PAIR]
    run.join_in_agreement(*pair)
    first, last = pair[0].status["validation_first"], pair[0].status["validation_last"]
    assert last[0] >= 50_000 and last[1] < first[1] - 0.7, "the published model has learnt"
    counts = [v.worker.mixing.counts for v in pair]
    assert all(each.messages > each.mixings / 2 > 5 for each in counts), counts
    assert all(v.status["peer_bytes_sent"] > 0 and v.status["tokens"] > 0 for v in pair)


def test_long_pause_frees_the_memory_and_returns_to_the_others(swarm, monkeypatch):
    monkeypatch.setattr(pauses, "MOMENT_SECONDS", 0.0)
    run = swarm(strategy="decentralized-adam", token_budget=10_000_000)
    pair = [run.start(name, knows=other_names(name)) for name in PAIR]
    run.until(lambda: all(v.status.get("step", 0) > 5 for v in pair))
    paused = pair[1].worker
    control = LocalControl(paused.joined.folder.path)
    control.pause()
    run.until(lambda: paused.is_freed and not hasattr(paused, "mixing"))
    assert not hasattr(paused, "engine")
    step = pair[0].status["step"]
    run.until(lambda: pair[0].status["step"] > step + 5)  # it trains on alone
    control.resume()
    before = paused.metrics.step
    run.until(lambda: paused.metrics.step > before + 5 and paused.mixing.counts.messages > 0)
    for volunteer in pair:
        volunteer.leave()


@pytest.mark.slow  # the test before averages over the same links
def test_killed_machine_returns_to_the_others_weights(swarm):
    # One machine trains on, and must not have trained all tokens before the others are back.
    run = swarm(strategy="decentralized-adam", mixing_topology="complete", token_budget=150_000)
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    run.until(lambda: all(v.status.get("ledger_tokens", 0) > 20_000 for v in trio))
    trio[1].kill()
    LocalControl(trio[0].worker.joined.folder.path).pause()
    run.until(lambda: trio[0].status.get("activity") == "paused")
    back = run.start("ben", knows=other_names("ben"))
    run.until(lambda: back.worker.metrics.step > 40)
    LocalControl(trio[0].worker.joined.folder.path).resume()
    everybody = [trio[0], back, trio[2]]
    run.join_in_agreement(*everybody)
    assert back.worker.mixing.step > 40, "it went on at the others' step"


@pytest.mark.slow  # the parts are tested in tests/worker/mixing
def test_abandoned_step_leaves_the_anchor_without_a_neighbours_change(swarm):
    run = swarm(strategy="decentralized-adam")
    pair = [run.start(name, knows=other_names(name)) for name in PAIR]
    run.until(lambda: all(v.status.get("step", 0) > 5 for v in pair))
    engine = pair[0].worker.engine
    take_step, add_change = engine.step, engine.add_to_replica
    events: list[str] = []

    def abandon_first_step(*arguments):
        stats = take_step(*arguments)
        if "abandoned" in events:
            events.append("step")
            return stats
        events.append("abandoned")
        engine.reset_round()  # as the engine does where the loss is not finite
        return replace(stats, abandoned=True, tokens=0)

    def record_change(change):
        events.append("change")
        add_change(change)

    engine.add_to_replica = record_change
    engine.step = abandon_first_step
    run.until(lambda: events.count("step") > 10)
    after = events[events.index("abandoned") + 1 :]
    assert after[0] == "step" and "change" in after


@pytest.mark.slow  # the parts are tested in tests/worker/mixing
def test_machine_leaves_while_it_waits_for_a_neighbour(swarm, monkeypatch):
    patient = Patience(first_seconds=600.0, least_seconds=600.0)
    monkeypatch.setattr(neighbour_mixing, "PATIENCE", patient)
    run = swarm(strategy="decentralized-adam", token_budget=10_000_000)
    pair = [run.start(name, knows=other_names(name)) for name in PAIR]
    run.until(lambda: all(v.status.get("step", 0) > 5 for v in pair))
    LocalControl(pair[1].worker.joined.folder.path).pause()
    run.until(lambda: pair[1].status.get("activity") == "paused")
    seen = {"step": -1, "at": 0.0}

    def has_waited_and_reported() -> bool:
        status = pair[0].status
        if status["step"] != seen["step"]:
            seen.update(step=status["step"], at=status["at"])
        return status["at"] - seen["at"] > 3

    run.until(has_waited_and_reported)
    assert pair[0].status["activity"] == "training"
    pair[0].leave()
    assert pair[0].status["activity"] == "left"
