"""One machine's step and the arithmetic of a round, on the real anchor and the real codec."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.paths import TESTS, WORKER
from helpers.plans import (
    KINDS,
    RECIPE,
    TINY,
    FakeUpdate,
    exchange_state,
    sample_text,
    state_digest,
    train_round,
    weights_of,
)

from barnraise.exchange.compression.codec import encode
from barnraise.exchange.ledger.anchor import Anchor, initial_weights
from barnraise.spec import UNIT_BITS
from barnraise.swap.engine import Engine
from barnraise.swap.outer_optimizer import accumulate_feedback
from barnraise.swap.precision import units_to_float

# ---- steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind, new_engine):
    engine = new_engine(kind)
    losses = [engine.step([sample_text(8)]).loss for _ in range(40)]
    assert losses[0] > 5 and losses[-1] < 0.7 * losses[0]


def test_micro_batches_of_unequal_size_add_up_to_the_whole_batch(new_engine):
    whole, parts = new_engine(), new_engine()
    text = sample_text(8)
    one, many = whole.step([text]), parts.step([text[:5], text[5:6], text[6:]])
    assert one.tokens == many.tokens == 8 * TINY.context
    assert many.loss == pytest.approx(one.loss, rel=1e-6) and many.norm == pytest.approx(
        one.norm, rel=1e-5
    )
    for i in range(TINY.layers + 2):
        a, b = (engine.buffers.gradient(i, -1) for engine in (whole, parts))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_scale_scales_the_step(kind, new_engine):
    still, moved = new_engine(kind), new_engine(kind)
    before = weights_of(still)
    still.step([sample_text()], rate_scale=0.0)
    moved.step([sample_text()], rate_scale=0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(still), strict=True))
    largest = max(
        (a - b).abs().max().item() for a, b in zip(weights_of(moved), before, strict=True)
    )
    assert largest == pytest.approx(
        0.5 * RECIPE.learning_rate, rel=0.05
    )  # Adam's first step is its rate


@pytest.mark.parametrize("clipping", ["exact", "layer", "none"])
def test_the_norm_is_told_before_clipping_and_clipping_holds_the_step_to_it(clipping, new_engine):
    engine, free = (
        new_engine(plan=dict(clipping=c), clip=1e-3, learning_rate=1e-2) for c in (clipping, "none")
    )
    stats, unclipped = engine.step([sample_text()]), free.step([sample_text()])
    assert stats.norm == unclipped.norm > 0.1
    m = [
        engine.store.memory_record("moments", i, 0).view(torch.float32)[: engine.fragments[i].size]
        for i in range(TINY.layers + 2)
    ]
    taken = 10 * math.sqrt(
        sum(float(each.double().square().sum()) for each in m)
    )  # m = 0.1 g after one step
    assert taken == pytest.approx(stats.norm if clipping == "none" else 1e-3, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_where_in_the_data_the_next_step_begins_goes_with_its_update(kind, new_engine):
    engine = new_engine(kind)
    engine.step([sample_text()], position=7)
    assert (
        engine.progress_with_pending.position == 7
        and engine.progress_with_pending.optimizer_steps == 1
    )
    engine.flush()
    assert engine.progress == engine.progress_with_pending and engine.progress.position == 7
    assert engine.round_tokens == 4 * TINY.context


SAME_BITS = """
import tempfile, torch
from pathlib import Path
torch.set_num_threads(1)
from helpers.plans import state_digest, train_round, engine_of, tiny_plan
for kind in ("resident", "exact"):
    engine = engine_of(tiny_plan(kind), Path(tempfile.mkdtemp()))
    train_round(engine)
    train_round(engine, seq=2)
    print(state_digest(engine))
"""


def test_the_same_inputs_give_the_same_bits_in_two_processes_with_one_thread(tmp_path):
    roots = [str(WORKER), str(TESTS)]
    program = f"import sys; sys.path[:0] = {json.dumps(roots)}{SAME_BITS}"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, env={"TMPDIR": str(tmp_path)}
        )
        for _ in range(2)
    ]
    said = [run.communicate(timeout=120)[0].split() for run in runs]
    assert len(said[0][0]) > 100 and said[0] == said[1]
    assert said[0][0] == said[0][1], "whatever the tier"


# ---- rounds ------------------------------------------------------------------------------------------------------


HARVESTS = [*((kind, 0.9, 0.0) for kind in KINDS), ("resident", 1.0, 0.0), ("exact", 1.0, 0.0)]


@pytest.mark.parametrize(
    ("kind", "decay", "guess"), HARVESTS + [(kind, 1.0, 0.7) for kind in KINDS]
)
def test_harvest_is_bit_for_bit_what_the_blueprint_says(kind, decay, guess, new_engine):
    """Against numpy in fp32 and int64, written from DESIGN section 5."""
    engine = new_engine(kind, outer_rate=0.7, outer_momentum=0.6, feedback_decay=decay)
    count, weight = TINY.layers + 2, np.float32(0.3)
    sizes = [fragment.size for fragment in TINY.fragments()]
    momentum = [np.zeros(size, np.float32) for size in sizes]
    feedback, said, owed = ([np.zeros(size, np.int64) for size in sizes] for _ in range(3))
    for seq in range(1, 4):
        for step in range(3):
            engine.step([sample_text(seed=10 * seq + step)])
            engine.queue_updates(
                prediction=tuple(guess * (seq + step) * (i + 1) / count for i in range(count))
            )
        engine.flush()
        engine.apply_queued()
        replicas = [weights.numpy() for weights in weights_of(engine)]
        anchors = [units.numpy() for units in exchange_state(engine, "anchor")]
        harvested = [
            (part.payload, part.units.numpy().copy()) for part in engine.end_round(encode, 0.3)
        ]
        assert len(harvested) == count
        kept = {
            name: [t.numpy() for t in exchange_state(engine, name)]
            for name in ("anchor", "momentum", "feedback")
        }
        fresh = weights_of(engine)
        for i, (payload, units) in enumerate(harvested):
            guessed = np.float32(guess * (seq + 2) * (i + 1) / count)
            start = anchors[i].astype(np.float32) * np.float32(2.0**-26) - momentum[i] * guessed
            delta = weight * (start - replicas[i])
            momentum[i] = momentum[i] * np.float32(0.6) + delta
            outer = (momentum[i] * np.float32(0.6) + delta) * np.float32(0.7)
            rounded = np.rint(outer.astype(np.float64) * 2.0**26).astype(np.int64)
            feedback[i] = (
                np.rint(decay * feedback[i]).astype(np.int64) if decay != 1 else feedback[i]
            ) + rounded
            sent, reply = encode(torch.from_numpy(-feedback[i]).to(torch.int32))
            assert payload == sent and np.array_equal(units, reply.numpy())
            feedback[i] = feedback[i] + reply.numpy()
            said[i] += reply.numpy()
            owed[i] += rounded
            assert np.array_equal(kept["momentum"][i], momentum[i])
            assert np.array_equal(kept["feedback"][i], feedback[i])
            assert np.array_equal(kept["anchor"][i], anchors[i] + reply.numpy())
            begun = (
                units_to_float(torch.from_numpy(kept["anchor"][i])).numpy() - momentum[i] * guessed
            )
            assert np.array_equal(fresh[i], begun)
            if decay == 1.0:
                assert np.array_equal(feedback[i] - said[i], owed[i]), (
                    "sent + residual is the sum of the rounded steps"
                )
        assert engine.round_tokens == 0
    assert any(f.any() for f in feedback), "the codec loses something, or this test shows nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_says_its_fragments_as_a_round_does_and_leaves_the_others_as_they_are(
    kind, new_engine
):
    whole, turn = new_engine(kind), new_engine(kind)
    for engine in (whole, turn):
        for step in range(3):
            engine.step([sample_text(seed=step)])
        engine.flush()
    before, replica = (
        {name: exchange_state(turn, name) for name in ("anchor", "momentum", "feedback")},
        weights_of(turn),
    )
    said = [part.payload for part in whole.end_round(encode, 0.3)]
    due = {1, 3}
    found = {part.fragment: part.payload for part in turn.end_round(encode, 0.3, due)}
    assert found == {i: payload for i, payload in enumerate(said) if i in due}
    for name, parts in before.items():
        for i, (was, now, ended) in enumerate(
            zip(parts, exchange_state(turn, name), exchange_state(whole, name), strict=True)
        ):
            assert torch.equal(now, ended if i in due else was), (name, i)
    for i, (was, now, ended) in enumerate(
        zip(replica, weights_of(turn), weights_of(whole), strict=True)
    ):
        assert torch.equal(now, ended if i in due else was), i
    assert turn.round_tokens == 0
    others = set(range(TINY.layers + 2)) - due
    rest = {part.fragment: part.payload for part in turn.end_round(encode, 0.3, others)}
    assert rest == {i: payload for i, payload in enumerate(said) if i not in due}
    assert state_digest(turn) == state_digest(whole)


def test_a_step_that_is_pending_at_a_turns_end_stays_so_and_counts_once(new_engine):
    engine = new_engine("staged")
    engine.step([sample_text()])
    assert (
        engine.progress_with_pending.optimizer_steps == 1 and engine.progress.optimizer_steps == 0
    ), "its update waits for the next step"
    list(engine.end_round(encode, 1.0, {1}))
    assert engine.progress.optimizer_steps == 0 and engine.round_tokens == 0
    engine.step([sample_text(seed=1)])
    assert engine.round_tokens == 4 * TINY.context
    engine.flush()
    assert engine.progress.optimizer_steps == 2 and all(
        torch.isfinite(each).all() for each in weights_of(engine)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_says_nothing_of_a_fragment_leaves_it_as_it_is(kind, new_engine):
    engine, author = new_engine(kind), new_engine()
    author.step([sample_text()])
    (part,) = author.end_round(encode, 1.0, {2})
    payloads = [part.payload if i == 2 else b"" for i in range(TINY.layers + 2)]
    arrived = FakeUpdate("b", 1, payloads)
    before, replica = exchange_state(engine, "anchor"), weights_of(engine)
    engine.queue_updates(arrived)
    engine.step([sample_text(seed=5)])
    engine.apply_queued()
    for i, (was, now) in enumerate(zip(before, exchange_state(engine, "anchor"), strict=True)):
        said = torch.zeros_like(was) if (units := arrived.decode(i)) is None else units
        assert torch.equal(now, was + said) and (i == 2) == bool(said.any())
    assert engine.anchor.vector == {arrived.header.author: 1} and len(replica) == len(before)


@pytest.mark.parametrize("kind", KINDS)
def test_with_nothing_lost_and_no_momentum_the_anchor_becomes_the_replica(kind, new_engine):
    engine = new_engine(kind, outer_rate=1.0, outer_momentum=0.0)
    engine.step([sample_text()])
    replicas = weights_of(engine)
    list(engine.end_round(lambda values: (b"", values), 1.0))
    for replica, units in zip(replicas, exchange_state(engine, "anchor"), strict=True):
        assert (replica - units_to_float(units)).abs().max() <= 2.0**-25


def test_feedback_is_bounded_and_never_wraps():
    feedback = torch.tensor([2**30, -(2**30), 5], dtype=torch.int32)
    accumulate_feedback(feedback, torch.tensor([1e9, -1e9, 0.0]), 1.0)
    assert feedback.tolist() == [2**30, -(2**30), 5]


@pytest.mark.parametrize("kind", KINDS)
def test_two_machines_that_traded_hold_the_same_bits_whatever_the_order(kind, new_engine):
    one, two, three = new_engine(kind), new_engine(), new_engine(kind)
    first, second = train_round(one, "a", seed=1), train_round(two, "b", seed=2)
    one.queue_updates(second)
    two.step([sample_text(seed=9)])  # an update may come at any moment of a round
    two.queue_updates(first)
    for arrived in (second, first):
        three.queue_updates(arrived)
    for engine in (one, two, three):
        engine.apply_queued()
    assert one.anchor.digest() == two.anchor.digest() == three.anchor.digest()
    assert (
        one.anchor.vector == two.anchor.vector == {first.header.author: 1, second.header.author: 1}
    )
    assert (
        one.anchor.digest()
        != Anchor([initial_weights(fragment, 11) for fragment in TINY.fragments()]).digest()
    )


@pytest.mark.parametrize("clipping", ["exact", "layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_arrives_mid_round_is_not_taken_for_own_progress(kind, clipping, new_engine):
    """Whether it is folded in while steps go on or between them."""
    others = [train_round(new_engine(), "b", seed=2), train_round(new_engine(), "c", seed=3)]
    engine = new_engine(kind, dict(clipping=clipping))
    engine.step([sample_text()])
    engine.step([sample_text(seed=1)], rate_scale=0.0)
    before = progress_of(engine)
    for other in others:
        engine.queue_updates(other)
    engine.step([sample_text(seed=2)], rate_scale=0.0)
    engine.step([sample_text(seed=3)], rate_scale=0.0)
    for was, now in zip(before, progress_of(engine), strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=2.5e-7)
    assert max(p.abs().max().item() for p in before) > 1e-3
    assert engine.anchor.vector == {other.header.author: 1 for other in others}


@pytest.mark.parametrize("clipping", ["exact", "layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_guessed_of_updates_under_way_is_neither_progress_nor_anchor(
    kind, clipping, new_engine
):
    """It moves the replica by the momentum, comes off as the update itself arrives, and is in nothing that is said."""
    engine = new_engine(kind, dict(clipping=clipping))
    train_round(engine)
    engine.step([sample_text()])
    engine.step([sample_text(seed=1)], rate_scale=0.0)
    momentum, anchors, before = (
        exchange_state(engine, "momentum"),
        exchange_state(engine, "anchor"),
        progress_of(engine),
    )
    assert max(m.abs().max().item() for m in momentum) > 1e-3
    guess = tuple(0.8 * (i % 2) for i in range(TINY.layers + 2))  # of the blocks that are under way
    engine.queue_updates(prediction=guess)
    for seed in (2, 3):
        engine.step([sample_text(seed=seed)], rate_scale=0.0)
    for was, now, m, g in zip(before, progress_of(engine), momentum, guess, strict=True):
        torch.testing.assert_close(now, was + g * m, rtol=0, atol=2.5e-7)
    assert all(map(torch.equal, anchors, exchange_state(engine, "anchor")))
    other = train_round(new_engine(), "b", seed=2)
    engine.queue_updates(other, prediction=(0.0,) * len(guess))
    for seed in (4, 5):
        engine.step([sample_text(seed=seed)], rate_scale=0.0)
    assert (
        engine.progress.prediction == engine.progress_with_pending.prediction == (0.0,) * len(guess)
    )
    for was, now in zip(before, progress_of(engine), strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=5e-7)
    assert engine.anchor.vector[other.header.author] == 1


@pytest.mark.parametrize("drop", [Engine.reset_round, Engine.reset_momentum])
@pytest.mark.parametrize("kind", KINDS)
def test_a_guess_goes_with_the_round_and_with_the_momentum_it_was_made_of(kind, drop, new_engine):
    engine = new_engine(kind)
    train_round(engine)
    engine.queue_updates(prediction=(0.8,) * (TINY.layers + 2))
    engine.step([sample_text()], rate_scale=0.0)
    drop(engine)
    engine.flush()
    assert not any(engine.progress.prediction)
    for left in progress_of(engine):
        assert left.abs().max() <= 2.5e-7


def progress_of(engine: Engine) -> list[torch.Tensor]:
    replicas = weights_of(engine)
    return [
        units_to_float(units) - mine
        for units, mine in zip(exchange_state(engine, "anchor"), replicas, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_validation_is_of_the_anchor_and_equal_on_every_machine_that_holds_it(kind, new_engine):
    held_out = [sample_text(8, seed=50), sample_text(3, seed=51)]
    one, two = new_engine(), new_engine(kind)
    update = train_round(one, seed=3)
    before = two.evaluate(held_out)
    two.step([sample_text()])
    assert two.evaluate(held_out) == before, "the replica moved, the anchor did not"
    two.queue_updates(update)
    assert one.evaluate(held_out) == two.evaluate(held_out) != before
    one.reset_round()
    alone = [
        one.step([batch], rate_scale=0.0).loss for batch in held_out
    ]  # the replica is the anchor here
    assert one.evaluate(held_out) == pytest.approx((8 * alone[0] + 3 * alone[1]) / 11, rel=1e-6)


def test_integers_become_floats_exactly_where_a_float_can_hold_them():
    units = torch.tensor(
        [0, 1, -1, 1 << 26, -(1 << 30), (1 << 24) + 1, 2**31 - 1], dtype=torch.int32
    )
    exact = np.array(units.tolist(), np.float64) / 2.0**UNIT_BITS
    assert units_to_float(units).tolist() == exact.astype(np.float32).astype(np.float64).tolist()
