"""Two gloo ranks share weights and moments: losses, moves between engines, lost ranks, refusals."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
from helpers.effort import examples
from helpers.paths import ROOT
from helpers.worker.llama_models import QWEN, UNTIED
from helpers.worker.plans import bitwise

from barnraise.planning.limits import Limits
from barnraise.planning.rank_rules import explain_ranks, explain_split
from barnraise.spec import ADAMW, MUON
from barnraise.swap.sharded.rank_group import RankGroup
from barnraise.swap.sharded.tensor_split import cut_part, join_parts

sys.path.append(str(ROOT / "benchmarks" / "swap"))
from sharded_runs import open_sharded, sharded_plan

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("ranks")]

GPT = replace(bitwise.MODEL, layers=2)
STEPS = examples(15, exhaustive=100)


@pytest.fixture(scope="module")
def pair():
    torch.set_num_threads(1)
    group = RankGroup.start(["cpu", "cpu"])
    yield group
    group.close()


def plain_losses(model, steps, optimizer=ADAMW):
    return bitwise.run_plan(bitwise.resident_plan(model, optimizer=optimizer), steps)[0]


# Each model, with and without ranks that split its blocks; `make test-all` tries all of them.
FOLLOWED = [
    pytest.param(GPT, 1, ADAMW, id="gpt2"),
    pytest.param(UNTIED, 2, ADAMW, id="llama, split"),
    pytest.param(GPT, 2, MUON, id="gpt2, split, muon"),
    pytest.param(GPT, 2, ADAMW, id="gpt2, split", marks=pytest.mark.slow),
    pytest.param(UNTIED, 1, ADAMW, id="llama", marks=pytest.mark.slow),
    pytest.param(UNTIED, 1, MUON, id="llama, muon", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "tensor", "optimizer"), FOLLOWED)
def test_two_ranks_follow_the_loss_of_one(pair, model, tensor, optimizer):
    with open_sharded(sharded_plan(model, 2, tensor, optimizer=optimizer), pair) as engine:
        found = bitwise.train(engine, STEPS)
    expected = plain_losses(model, STEPS, optimizer)
    assert found == pytest.approx(expected, rel=1e-5) and found[-1] < found[0]


def test_qwen_and_retained_activations_follow_too(pair):
    plan = replace(sharded_plan(QWEN, 2), retained_blocks=1)
    with open_sharded(plan, pair) as engine:
        assert bitwise.train(engine, 5) == pytest.approx(plain_losses(QWEN, 5), rel=1e-5)


@pytest.mark.parametrize(("tensor", "optimizer"), [(1, MUON), (2, ADAMW)])
def test_state_moves_from_one_engine_to_ranks_and_back(pair, tensor, optimizer):
    swap = bitwise.open_engine(bitwise.resident_plan(GPT, optimizer=optimizer))
    bitwise.train(swap, 3)
    saved = {name: value.clone() for name, value in swap.state_dict().items()}
    with open_sharded(sharded_plan(GPT, 2, tensor, optimizer=optimizer), pair) as engine:
        engine.load_state_dict(saved)
        moved = engine.state_dict()
        assert moved.keys() == saved.keys()
        assert all(torch.equal(moved[name], saved[name]) for name in saved)
        on_ranks = bitwise.train(engine, 3)
        trained = {name: value.clone() for name, value in engine.state_dict().items()}
    swap.load_state_dict(saved)
    assert bitwise.train(swap, 3) == pytest.approx(on_ranks, rel=1e-5)
    swap.load_state_dict(trained)
    back = swap.state_dict()
    assert all(torch.equal(back[name], trained[name]) for name in trained)
    assert not torch.equal(trained["m.1"], saved["m.1"])
    swap.close()


class Arrival:
    header = "another author's update"

    def __init__(self, plan):
        self.plan = plan

    def decode(self, index):
        return torch.full((self.plan.fragments[index].size,), 1 << 10, dtype=torch.int32)


def test_round_and_arrivals_do_to_ranks_what_they_do_to_one(pair):
    """From the same state both engines publish and apply the same integers."""
    plain = bitwise.open_engine(bitwise.resident_plan(GPT))
    with open_sharded(sharded_plan(GPT, 2), pair) as engine:
        results = []
        for each in (plain, engine):
            each.queue_updates(Arrival(each.plan))
            bitwise.train(each, 1)
            replica = each.read_replica()
            parts = list(each.end_round(lambda units: (b"", units.clone()), weight=1.0))
            published = torch.cat([part.units for part in parts])
            anchor = torch.cat([each.anchors[i].clone() for i in range(len(each.fragments))])
            assert torch.equal(each.read_replica(), anchor.float() * 2.0**-26)
            results.append((replica, published, anchor))
            assert each.anchor.headers == [Arrival.header] and not each.round_tokens
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one.double(), other.double(), rtol=1e-4, atol=64)
        assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    plain.close()


def test_step_that_is_interrupted_changes_nothing(pair):
    with open_sharded(sharded_plan(GPT, 2), pair) as engine:
        bitwise.train(engine, 1)
        before = engine.read_replica()
        polls = itertools.count()
        batch = list(bitwise.sample_text(GPT, bitwise.SEQUENCES, seed=1).split(2))
        stats = engine.step(batch, position=2, should_stop=lambda: next(polls) > 0)
        assert stats.interrupted and torch.equal(engine.read_replica(), before)
        again = engine.step(batch, position=2).loss
        assert again == pytest.approx(plain_losses(GPT, 2)[1], rel=1e-6)


def test_step_that_is_not_finite_drops_the_round(pair):
    with open_sharded(sharded_plan(GPT, 2), pair) as engine:
        anchor = engine.read_replica()
        batch = list(bitwise.sample_text(GPT, bitwise.SEQUENCES, seed=0).split(2))
        engine.step(batch, rate_scale=1e30)
        stats = engine.step(batch, position=7)
        assert stats.abandoned and engine.progress.position == 7 and not engine.round_tokens
        assert torch.equal(engine.read_replica(), anchor)
        assert math.isfinite(bitwise.train(engine, 1)[0])


@pytest.mark.parametrize("model", [GPT, UNTIED], ids=["gpt2", "llama"])
def test_parts_of_all_ranks_join_to_the_whole_tensor(model):
    fragment = model.fragments()[1]
    for slot in fragment.slots:
        whole = torch.arange(slot.size).view(slot.shape)
        parts = [cut_part(fragment, slot, whole, rank, 2) for rank in range(2)]
        assert torch.equal(join_parts(fragment, slot, parts), whole)


def test_what_ranks_cannot_train_is_refused_in_a_sentence():
    assert "3 ranks cannot share 2 heads evenly" in explain_split(GPT, 3)
    assert "2 ranks cannot share 1 key-value heads evenly" in explain_split(QWEN, 2)
    assert "--tensor 2 divides them" in explain_split(replace(GPT, heads=4, width=32), 3)
    assert "7 sequences a step" in explain_ranks(GPT, Limits(), 7, 2, 1)
    assert "groups of 2" in explain_ranks(GPT, Limits(), 8, 3, 2)
    assert "32 bits" in explain_ranks(GPT, Limits(moments_bits=8), 8, 2, 1)
    assert "whole gradient" in explain_ranks(GPT, Limits(clipping="layer"), 8, 2, 1)
    assert not explain_ranks(UNTIED, Limits(), 8, 4, 2)
