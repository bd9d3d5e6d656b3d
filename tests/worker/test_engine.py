"""One machine's step and the arithmetic of a round, on the real anchor and the real codec."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import barnraise
from barnraise.errors import StateError
from barnraise.exchange.anchor import Anchor
from barnraise.exchange.codec import decode, encode
from barnraise.spec import UNIT_BITS, ModelSpec, Recipe
from barnraise.swap.arena import to_float
from barnraise.swap.engine import Engine, accumulate
from barnraise.wire import FragmentUpdate, Update

TINY = ModelSpec(layers=2, width=32, heads=4, context=16, vocabulary=300)
RECIPE = Recipe(learning_rate=3e-3, clip=1.0)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
FRAGMENT = FragmentUpdate(digest="0" * 64, size=1, sketch="0" * 16)


def some_text(sequences: int = 4, seed: int = 0) -> torch.Tensor:
    """Text with something to learn: each token is mostly the one before plus one."""
    stir = torch.Generator().manual_seed(seed)
    start = torch.randint(TINY.vocabulary, (sequences, 1), generator=stir)
    return (start + torch.arange(TINY.context + 1)) % TINY.vocabulary


def new_engine(device: str = "cpu", **recipe) -> Engine:
    return Engine(TINY, dataclasses.replace(RECIPE, **recipe), Anchor.initial(TINY, 11), device)


class Arrived:
    """An update as the exchange hands it over."""

    def __init__(self, author: str, seq: int, payloads: list[bytes]):
        self.header = Update(
            run="01890000-0000-7000-8000-000000000000", peer=author * 64, incarnation="0" * 16, seq=seq,
            previous="0" * 64, tokens=64, total=64 * seq, fragments=[FRAGMENT] * len(payloads),
        )  # fmt: skip
        self.payloads = payloads

    def decode(self, index: int) -> torch.Tensor:
        return decode(self.payloads[index], TINY.fragments()[index].size)


def a_round(engine: Engine, author: str = "a", seq: int = 1, weight: float = 1.0, seed: int = 0) -> Arrived:
    for step in range(3):
        engine.step([some_text(seed=100 * seed + step)])
    arrived = Arrived(author, seq, [payload for payload, _ in engine.harvest(encode, weight)])
    engine.anchor.note(arrived.header)
    return arrived


# ---- steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_falls(device):
    engine = new_engine(device)
    losses = [engine.step([some_text(8)]).loss for _ in range(60)]
    assert losses[0] > 5 and losses[-1] < 0.5 * losses[0]


def test_micro_batches_of_unequal_size_add_up_to_the_whole_batch():
    whole, parts = new_engine(), new_engine()
    text = some_text(8)
    one, many = whole.step([text]), parts.step([text[:5], text[5:6], text[6:]])
    assert one.tokens == many.tokens == 8 * TINY.context
    assert many.loss == pytest.approx(one.loss, rel=1e-6) and many.norm == pytest.approx(one.norm, rel=1e-5)
    for a, b in zip(whole.arena.layers, parts.arena.layers, strict=True):
        torch.testing.assert_close(a.gradient, b.gradient, rtol=1e-4, atol=1e-6)


def test_the_rate_scale_scales_the_step():
    still, moved = new_engine(), new_engine()
    before = [layer.weights.clone() for layer in still.arena.layers]
    still.step([some_text()], rate_scale=0.0)
    moved.step([some_text()], rate_scale=0.5)
    assert all(torch.equal(a, layer.weights) for a, layer in zip(before, still.arena.layers, strict=True))
    largest = max((layer.weights - b).abs().max().item() for layer, b in zip(moved.arena.layers, before, strict=True))
    assert largest == pytest.approx(0.5 * RECIPE.learning_rate, rel=0.05)  # Adam's first step is its rate


def test_a_gradient_that_is_not_finite_abandons_the_round_and_the_next_step_works():
    engine = new_engine()
    engine.step([some_text()])
    moments = [layer.m.clone() for layer in engine.arena.layers]
    engine.arena.layers[1].weights[5] = torch.nan
    broken = engine.step([some_text()])
    assert broken.abandoned and broken.tokens == 0 and engine.round_tokens == 0
    for layer, units, m in zip(engine.arena.layers, engine.anchor.fragments, moments, strict=True):
        assert torch.equal(layer.weights, to_float(units)) and torch.equal(layer.m, m)
    again = engine.step([some_text()])
    assert not again.abandoned and 0 < again.loss < 7 and engine.round_tokens == again.tokens


SAME_BITS = """
import torch
torch.set_num_threads(1)
from test_engine import a_round, bits, new_engine
engine = new_engine()
a_round(engine)
a_round(engine, seq=2)
print(bits(engine))
"""


def bits(engine: Engine) -> str:
    hasher = hashlib.blake2b()
    for name, tensor in sorted(engine.state().items()):
        hasher.update(name.encode() + tensor.numpy().tobytes())
    return hasher.hexdigest()


def test_the_same_inputs_give_the_same_bits_in_two_processes_with_one_thread():
    roots = [str(Path(barnraise.__file__).parents[1]), str(Path(__file__).parent)]
    program = f"import sys; sys.path[:0] = {json.dumps(roots)}{SAME_BITS}"
    runs = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    said = [run.communicate(timeout=120)[0] for run in runs]
    assert len(said[0]) > 100 and said[0] == said[1]


# ---- rounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_harvest_is_bit_for_bit_what_the_blueprint_says(decay):
    """Against numpy in fp32 and int64, written from DESIGN section 5."""
    engine = new_engine(outer_rate=0.7, outer_momentum=0.6, feedback_decay=decay)
    count, weight = len(engine.arena.layers), np.float32(0.3)
    momentum = [np.zeros(layer.fragment.size, np.float32) for layer in engine.arena.layers]
    feedback = [np.zeros(layer.fragment.size, np.int64) for layer in engine.arena.layers]
    said = [np.zeros(layer.fragment.size, np.int64) for layer in engine.arena.layers]
    owed = [np.zeros(layer.fragment.size, np.int64) for layer in engine.arena.layers]
    for seq in range(1, 4):
        for step in range(3):
            engine.step([some_text(seed=10 * seq + step)])
        anchors = [units.numpy().copy() for units in engine.anchor.fragments]
        replicas = [layer.weights.numpy().copy() for layer in engine.arena.layers]
        harvested = [(payload, units.numpy().copy()) for payload, units in engine.harvest(encode, 0.3)]
        assert len(harvested) == count
        for i, (payload, units) in enumerate(harvested):
            delta = weight * (anchors[i].astype(np.float32) * np.float32(2.0**-26) - replicas[i])
            momentum[i] = momentum[i] * np.float32(0.6) + delta
            outer = (momentum[i] * np.float32(0.6) + delta) * np.float32(0.7)
            rounded = np.rint(outer.astype(np.float64) * 2.0**26).astype(np.int64)
            feedback[i] = (np.rint(decay * feedback[i]).astype(np.int64) if decay != 1 else feedback[i]) + rounded
            sent, reply = encode(torch.from_numpy(-feedback[i]).to(torch.int32))
            assert payload == sent and np.array_equal(units, reply.numpy())
            feedback[i] = feedback[i] + reply.numpy()
            said[i] += reply.numpy()
            owed[i] += rounded
            layer = engine.arena.layers[i]
            assert np.array_equal(layer.momentum.numpy(), momentum[i])
            assert np.array_equal(layer.feedback.numpy(), feedback[i])
            assert np.array_equal(engine.anchor.fragments[i].numpy(), anchors[i] + reply.numpy())
            assert torch.equal(layer.weights, to_float(engine.anchor.fragments[i]))
            if decay == 1.0:
                assert np.array_equal(feedback[i] - said[i], owed[i]), "sent + residual is the sum of the rounded steps"
    assert any(f.any() for f in feedback), "the codec loses something, or this test shows nothing"


def test_with_nothing_lost_and_no_momentum_the_anchor_becomes_the_replica():
    engine = new_engine(outer_rate=1.0, outer_momentum=0.0)
    engine.step([some_text()])
    replicas = [layer.weights.clone() for layer in engine.arena.layers]
    list(engine.harvest(lambda values: (b"", values), 1.0))
    for replica, units in zip(replicas, engine.anchor.fragments, strict=True):
        assert (replica - to_float(units)).abs().max() <= 2.0**-25


def test_feedback_is_bounded_and_never_wraps():
    feedback = torch.tensor([2**30, -(2**30), 5], dtype=torch.int32)
    accumulate(feedback, torch.tensor([1e9, -1e9, 0.0]), 1.0)
    assert feedback.tolist() == [2**30, -(2**30), 5]


def test_two_machines_that_traded_hold_the_same_bits_whatever_the_order():
    one, two, three = new_engine(), new_engine(), new_engine()
    first, second = a_round(one, "a", seed=1), a_round(two, "b", seed=2)
    one.add(second)
    two.step([some_text(seed=9)])  # an update may come at any moment of a round
    two.add(first)
    for arrived in (second, first):
        three.add(arrived)
    assert one.anchor.digest() == two.anchor.digest() == three.anchor.digest()
    assert one.anchor.vector == two.anchor.vector == {first.header.author: 1, second.header.author: 1}
    assert one.anchor.digest() != new_engine().anchor.digest()


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_that_arrives_mid_round_is_not_taken_for_own_progress(device):
    other = a_round(new_engine(), "b", seed=2)
    engine = new_engine(device)
    engine.step([some_text()])
    progress = [
        to_float(units) - layer.weights.cpu()
        for units, layer in zip(engine.anchor.fragments, engine.arena.layers, strict=True)
    ]
    engine.add(other)
    for before, units, layer in zip(progress, engine.anchor.fragments, engine.arena.layers, strict=True):
        torch.testing.assert_close(to_float(units) - layer.weights.cpu(), before, rtol=0, atol=2.5e-7)
    assert max(p.abs().max().item() for p in progress) > 1e-3


def test_validation_is_of_the_anchor_and_equal_on_every_machine_that_holds_it():
    held_out = [some_text(8, seed=50), some_text(3, seed=51)]
    one, two = new_engine(), new_engine()
    update = a_round(one, seed=3)
    before = two.evaluate(held_out)
    two.step([some_text()])
    assert two.evaluate(held_out) == before, "the replica moved, the anchor did not"
    two.add(update)
    assert one.evaluate(held_out) == two.evaluate(held_out) != before
    one.reset_round()
    alone = [one.step([batch], rate_scale=0.0).loss for batch in held_out]  # the replica is the anchor here
    assert one.evaluate(held_out) == pytest.approx((8 * alone[0] + 3 * alone[1]) / 11, rel=1e-6)


# ---- keeping -----------------------------------------------------------------------------------------------------


def test_a_restored_engine_goes_on_with_the_same_bits():
    engine, again = new_engine(), new_engine()
    a_round(engine)
    again.load({name: tensor.clone() for name, tensor in engine.state().items()})
    for one in (engine, again):
        a_round(one, "c", seed=4)
    assert bits(engine) == bits(again)


def test_the_state_of_another_model_is_refused_by_name_and_changes_nothing():
    engine = new_engine()
    before = bits(engine)
    wider = ModelSpec(layers=2, width=64, heads=4, context=16, vocabulary=300)
    deeper = ModelSpec(layers=3, width=32, heads=4, context=16, vocabulary=300)
    for other in (wider, deeper):
        with pytest.raises(StateError, match="does not fit"):
            engine.load(Engine(other, RECIPE, Anchor.initial(other, 0)).state())
    assert bits(engine) == before


def test_forgotten_feedback_is_not_said_again():
    engine = new_engine()
    a_round(engine)
    assert any(layer.feedback.any() for layer in engine.arena.layers)
    engine.forget_feedback()
    assert not any(layer.feedback.any() for layer in engine.arena.layers)
    assert any(layer.momentum.any() for layer in engine.arena.layers)


def test_integers_become_floats_exactly_where_a_float_can_hold_them():
    units = torch.tensor([0, 1, -1, 1 << 26, -(1 << 30), (1 << 24) + 1, 2**31 - 1], dtype=torch.int32)
    exact = np.array(units.tolist(), np.float64) / 2.0**UNIT_BITS
    assert to_float(units).tolist() == exact.astype(np.float32).astype(np.float64).tolist()
