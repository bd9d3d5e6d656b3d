"""Several machines hold one span: they share its micro-batches, and end a round alike."""

from dataclasses import replace

import pytest
import torch
from helpers.worker.crews import LocalCrew, deal
from helpers.worker.plans import bitwise

from barnraise.errors import StateError
from barnraise.ledger.anchor import compute_sketch
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.training.training_engine import Encoder

ENCODE = Encoder(QuantizationScheme.parse("dense4"))
MICRO_BATCHES = 4


def open_crew(folder, *plans):
    """Return a crew of a lead and two holders, with these plans, of the blocks above its own."""
    plan = bitwise.resident_plan(bitwise.MODEL, MICRO_BATCHES)
    blocks = tuple(range(1, bitwise.MODEL.layers + 1))
    plan = replace(plan, forward_groups=(blocks,), backward_groups=(blocks,))
    return LocalCrew([plan, *(plans or [plan] * 2)], deal(plan, (4, 4), holders=(1, 2)), folder)


def start(crew):
    """Begin at the initial weights."""
    return crew.start([bitwise.initial_units(each) for each in bitwise.MODEL.fragments()])


def train(engine, steps, first=0):
    """Return the losses of some steps."""
    found = []
    for step in range(first, first + steps):
        text = bitwise.sample_text(bitwise.MODEL, bitwise.SEQUENCES, seed=step)
        batches = list(text.split(bitwise.SEQUENCES // MICRO_BATCHES))
        found.append(engine.step(batches, position=step + 1).loss)
    return found


def test_holders_train_apart_and_end_a_round_with_one_anchor(tmp_path):
    with open_crew(tmp_path) as crew:
        engine = start(crew)
        assert torch.equal(crew.engines[1].anchors[5], crew.engines[2].anchors[5])
        losses = train(engine, 6)
        engine.flush()
        before = [bitwise.read_state(crew.engines[n])[0] for n in (1, 2)]
        assert not torch.equal(*before), "each trains on its own micro-batches"
        list(engine.end_round(ENCODE, 1.0))
        anchors, replicas, feedback = (
            [read(crew.engines[n]) for n in (1, 2)]
            for read in (
                lambda each: list(each.anchors)[5],
                lambda each: each.read_replica_fragment(5, flushes=False),
                lambda each: each.state_dict()["feedback.5"],
            )
        )
        assert torch.equal(*anchors) and torch.equal(*replicas) and torch.equal(*feedback)
        losses += train(engine, 30, first=6)
        assert losses[-1] < losses[0] - 0.3
        list(engine.end_round(ENCODE, 1.0))
        assert engine.evaluate([bitwise.sample_text(bitwise.MODEL, 3, seed=77)]) < losses[0]
        assert not crew.failures


def test_holders_that_swap_merge_as_those_in_memory(tmp_path):
    """One waits with its activations in RAM and has fewer of them than planned, one uses a disk."""
    staged = bitwise.Case(MICRO_BATCHES, "memory", "exact", 127, 127).plan()
    from_disk = bitwise.Case(MICRO_BATCHES, "disk exact", "exact", 127, 127).plan()
    with open_crew(tmp_path, replace(staged, boundaries="host"), from_disk) as crew:
        engine = start(crew)
        losses = train(engine, 3)
        list(engine.end_round(ENCODE, 1.0))
        losses += train(engine, 3, first=3)
        list(engine.end_round(ENCODE, 1.0))
        assert losses[-1] < losses[0] and all(engine.holders.dealt.values())
        for i in range(5, 9):
            assert torch.equal(crew.engines[1].anchors[i], crew.engines[2].anchors[i])
        assert not crew.failures


def test_round_merges_replicas_by_share(tmp_path):
    with open_crew(tmp_path) as crew:
        engine = start(crew)
        train(engine, 3)
        engine.flush()
        shares = [engine.holders.dealt[n] / (3 * MICRO_BATCHES) for n in (1, 2)]
        replicas = [crew.engines[n].read_replica_fragment(6, flushes=True) for n in (1, 2)]
        expected = sum(share * each for share, each in zip(shares, replicas, strict=True))
        engine.holders.merge_replicas([6], flushes=True)
        for n in (1, 2):
            merged = crew.engines[n].read_replica_fragment(6, flushes=False)
            # Two roundings near one, whose last place is 1.2e-7 in fp32.
            assert torch.allclose(merged, expected, rtol=0, atol=2.5e-7)
        assert sum(shares) == pytest.approx(1)


def test_holder_without_a_channel_is_skipped_until_it_is_back(tmp_path):
    with open_crew(tmp_path) as crew:
        engine = start(crew)
        train(engine, 1)
        crew.set_dialling(False)
        crew.links[0].end_link(1, "cut by a test")
        assert crew.links[0].wait(lambda: 1 not in crew.links[0].connected(), 30)
        before = dict(engine.holders.dealt)
        train(engine, 2, first=1)
        dealt = engine.holders.dealt
        assert dealt[1] == before[1] and dealt[2] == before[2] + 2 * MICRO_BATCHES
        crew.set_dialling(True)
        assert crew.links[0].wait(lambda: 1 in crew.links[0].connected(), 30)
        train(engine, 3, first=3)
        assert engine.holders.dealt[1] > before[1]
        list(engine.end_round(ENCODE, 1.0))
        anchors = [list(crew.engines[n].anchors) for n in (1, 2)]
        assert all(torch.equal(*both) for both in zip(*anchors, strict=True))
        assert not crew.failures


@pytest.mark.parametrize("frames", [1, 3, 4, 5])
def test_holder_that_breaks_in_a_step_costs_that_attempt_alone(frames, tmp_path):
    """It waits for the decision on the step, and gets it after others that were without it."""
    with open_crew(tmp_path) as crew:
        engine = start(crew)
        crew.set_dialling(False)
        crew.cut_after(0, 1, frames=frames)
        losses = train(engine, 3)
        assert engine.last_problem
        crew.set_dialling(True)
        assert crew.links[0].wait(lambda: 1 in crew.links[0].connected(), 30)
        before = engine.holders.dealt[1]
        losses += train(engine, 3, first=3)
        assert losses[-1] < losses[0] and engine.holders.dealt[1] > before
        assert sum(engine.holders.dealt.values()) == 6 * MICRO_BATCHES
        list(engine.end_round(ENCODE, 1.0))
        assert torch.equal(crew.engines[1].anchors[6], crew.engines[2].anchors[6])
        assert not crew.failures


@pytest.mark.parametrize("number", [1, 2])
def test_holder_that_restarts_costs_no_round(number, tmp_path):
    """The first holder of a span encodes its update; the other one does where that is lost."""
    with open_crew(tmp_path) as crew:
        engine = start(crew)
        losses = train(engine, 3)
        crew.restart_member(number)
        before = engine.holders.dealt[number]
        losses += train(engine, 27, first=3)
        assert engine.holders.dealt[number] == before and crew.links[0].dropped == {number}
        list(engine.end_round(ENCODE, 1.0))
        assert losses[-1] < losses[0] - 0.3
        assert engine.evaluate([bitwise.sample_text(bitwise.MODEL, 3, seed=77)]) < losses[0]
        left = crew.engines[3 - number]
        assert torch.equal(crew.anchor.fragments[6], left.anchors[6])
        crew.anchor.fragments[6] = left.anchors[6] + 1
        assert crew.anchor.fragments.compute_sketch(6) == compute_sketch(left.anchors[6])
        assert not crew.failures


def test_holder_that_fails_at_a_rounds_end_is_replaced_by_the_other(tmp_path, monkeypatch):
    with open_crew(tmp_path) as crew:
        engine = start(crew)
        train(engine, 2)

        def fail(*values):
            raise StateError("its disk is full")

        monkeypatch.setattr(crew.engines[1], "end_round", fail)
        parts = {part.fragment: part.units for part in engine.end_round(ENCODE, 1.0)}
        before = bitwise.initial_units(bitwise.MODEL.fragments()[6])
        assert torch.equal(crew.engines[2].anchors[6], before + parts[6])
        assert crew.links[0].dropped == {1} and len(crew.failures) == 1
        train(engine, 2, first=2)


def test_abandoned_step_drops_the_round_of_idle_holders_too(tmp_path):
    with open_crew(tmp_path) as crew:
        engine = start(crew)
        train(engine, 2)
        engine.holders.skip(1)
        assert engine.holders.draw_routes(3).members == [2]
        text = bitwise.sample_text(bitwise.MODEL, bitwise.SEQUENCES, seed=9)
        batches = list(text.split(bitwise.SEQUENCES // MICRO_BATCHES))
        engine.step(batches, 1e30, position=3)
        assert engine.step(batches, 1.0, position=4).abandoned
        engine.flush()
        for n in (1, 2):
            engine_n = crew.engines[n]
            replica = engine_n.read_replica_fragment(6, flushes=True)
            assert torch.equal(replica, engine_n.anchors[6].float() * 2.0**-26)
        assert not crew.failures
