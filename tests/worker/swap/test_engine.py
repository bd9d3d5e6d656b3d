"""Tests of the engine's steps and rounds, on the real anchor and the real codec."""

import gc
import math
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from helpers.worker.plans import (
    KINDS,
    RECIPE,
    TINY,
    FakeUpdate,
    engine_of,
    exchange_state,
    sample_text,
    state_digest,
    tiny_plan,
    train_round,
    weights_of,
)

from barnraise.ledger import codec
from barnraise.ledger.anchor import Anchor, initial_weights
from barnraise.ledger.codec import encode
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.spec import UNIT_BITS
from barnraise.swap.engine import Engine
from barnraise.swap.precision import units_to_float

# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_step_reduces_the_loss(kind, new_engine):
    engine = new_engine(kind)
    losses = [engine.step([sample_text(8)]).loss for _ in range(40)]
    assert losses[0] > 5 and losses[-1] < 0.7 * losses[0]


def test_step_with_unequal_micro_batches_equals_the_whole_batch(new_engine):
    whole, parts = new_engine(), new_engine()
    text = sample_text(8)
    one, many = whole.step([text]), parts.step([text[:5], text[5:6], text[6:]])
    assert one.tokens == many.tokens == 8 * TINY.context
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.norm == pytest.approx(one.norm, rel=1e-5)
    for i in range(TINY.layers + 2):
        a, b = (engine.buffers.gradient(i, -1) for engine in (whole, parts))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_step_scales_with_the_rate_scale(kind, new_engine):
    still, moved = new_engine(kind), new_engine(kind)
    before = weights_of(still)
    still.step([sample_text()], rate_scale=0.0)
    moved.step([sample_text()], rate_scale=0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(still), strict=True))
    largest = max(
        (a - b).abs().max().item() for a, b in zip(weights_of(moved), before, strict=True)
    )
    # Adam's first step changes each weight by the learning rate.
    assert largest == pytest.approx(0.5 * RECIPE.learning_rate, rel=0.05)


@pytest.mark.parametrize("clipping", ["exact", "layer", "none"])
def test_step_reports_the_norm_before_clipping_and_clips_to_it(clipping, new_engine):
    engine, free = (
        new_engine(plan=dict(clipping=c), clip=1e-3, learning_rate=1e-2) for c in (clipping, "none")
    )
    stats, unclipped = engine.step([sample_text()]), free.step([sample_text()])
    assert stats.norm == unclipped.norm > 0.1
    m = [
        engine.store.memory_record("moments", i, 0).view(torch.float32)[: engine.fragments[i].size]
        for i in range(TINY.layers + 2)
    ]
    # After one step, m is a tenth of the gradient.
    clipped_norm = 10 * math.sqrt(sum(float(moment.double().square().sum()) for moment in m))
    assert clipped_norm == pytest.approx(stats.norm if clipping == "none" else 1e-3, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_step_position_is_stored_with_its_update(kind, new_engine):
    engine = new_engine(kind)
    engine.step([sample_text()], position=7)
    assert engine.progress_with_pending.position == 7
    assert engine.progress_with_pending.optimizer_steps == 1
    engine.flush()
    assert engine.progress == engine.progress_with_pending and engine.progress.position == 7
    assert engine.round_tokens == 4 * TINY.context


# ---- rounds --------------------------------------------------------------------------------------


def end_sparse_round(engine: Engine, fragments: set[int] | None = None) -> None:
    """End a round whose update holds one value in 64, and carry the rest into the next one."""
    sparse = partial(codec.encode, scheme=QuantizationScheme.parse("top64x4"))
    list(engine.end_round(sparse, 0.5, fragments, carries_residual=True))


@pytest.mark.parametrize("kind", KINDS)
def test_carried_residual_is_of_each_fragment_and_dropped_with_the_round(kind, new_engine):
    engine = new_engine(kind)
    for seed in (3, 4):  # the first step may wait for the second one, and the second for a third
        engine.step([sample_text(seed=seed)])
    end_sparse_round(engine, {1, 2})
    assert engine.progress.residual == (0.0, 1.0, 1.0, *(0.0,) * (TINY.layers - 1))
    engine.step([sample_text(seed=1)])
    engine.reset_round()
    assert not any(engine.progress.residual)
    assert any(units.any() for units in exchange_state(engine, "feedback"))
    assert not any(left.any() for left in progress_of(engine))
    end_sparse_round(engine)
    engine.reset_feedback()
    assert not any(units.any() for units in exchange_state(engine, "feedback"))
    assert not any(left.any() for left in progress_of(engine))


def test_reopened_state_on_disk_continues_with_the_residual_in_the_replica(tmp_path):
    plan = tiny_plan("exact")
    engine = engine_of(plan, tmp_path)
    engine.step([sample_text()])
    end_sparse_round(engine)
    engine.step([sample_text(seed=1)])
    engine.commit(closing=True)
    before, progress = state_digest(engine), engine.progress
    engine.close()
    engine = engine_of(plan, tmp_path)
    assert [*engine.progress.residual] == [*progress.residual] == [1.0] * (TINY.layers + 2)
    assert state_digest(engine) == before
    engine.close()


def test_loaded_state_begins_a_round_at_the_anchor(new_engine):
    """A checkpoint of a state in memory does not contain the replica."""
    engine, loaded = new_engine(), new_engine()
    engine.step([sample_text()])
    end_sparse_round(engine)
    loaded.load_state_dict(engine.state_dict())
    assert not any(loaded.progress.residual) and any(engine.progress.residual)
    assert not any(left.any() for left in progress_of(loaded))


def end_long_round(engine: Engine) -> None:
    """End a round without momentum."""
    plain = partial(codec.encode, scheme=QuantizationScheme.parse("dense4"))
    list(engine.end_round(plain, 0.5, has_momentum=False))


def test_momentum_that_only_serves_predictions_is_not_in_a_checkpoint(new_engine):
    """A restarted machine begins without predictions, and would publish it."""
    engine, loaded = new_engine(), new_engine()
    engine.step([sample_text()])
    end_long_round(engine)
    assert engine.progress.forecast == (1.0,) * (TINY.layers + 2)
    assert all(momentum.any() for momentum in exchange_state(engine, "momentum"))
    loaded.load_state_dict(engine.state_dict())
    assert not any(loaded.progress.forecast)
    assert not any(momentum.any() for momentum in exchange_state(loaded, "momentum"))
    end_sparse_round(engine)
    assert not any(engine.progress.forecast)


def test_reopened_state_on_disk_forgets_the_momentum_of_a_long_round(tmp_path):
    plan = tiny_plan("exact")
    engine = engine_of(plan, tmp_path)
    engine.step([sample_text()])
    end_long_round(engine)
    engine.commit(closing=True)
    engine.close()
    engine = engine_of(plan, tmp_path)
    assert all(momentum.any() for momentum in exchange_state(engine, "momentum"))
    engine.step([sample_text(seed=1)], rate_scale=0.0)
    end_sparse_round(engine)
    assert not any(momentum.any() for momentum in exchange_state(engine, "momentum")), (
        "a round that learns nothing, with momentum, after one without"
    )
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_end_round_of_some_fragments_leaves_the_others_unchanged(kind, new_engine):
    whole, partial_rounds = new_engine(kind), new_engine(kind)
    for engine in (whole, partial_rounds):
        for step in range(3):
            engine.step([sample_text(seed=step)])
        engine.flush()
    kinds = ("anchor", "momentum", "feedback")
    before = {name: exchange_state(partial_rounds, name) for name in kinds}
    replica = weights_of(partial_rounds)
    payloads = [part.payload for part in whole.end_round(encode, 0.3)]
    first_part = {1, 3}
    first = {
        part.fragment: part.payload for part in partial_rounds.end_round(encode, 0.3, first_part)
    }
    assert first == {i: payload for i, payload in enumerate(payloads) if i in first_part}
    for name, parts in before.items():
        for i, (was, now, ended) in enumerate(
            zip(
                parts,
                exchange_state(partial_rounds, name),
                exchange_state(whole, name),
                strict=True,
            )
        ):
            assert torch.equal(now, ended if i in first_part else was), (name, i)
    for i, (was, now, ended) in enumerate(
        zip(replica, weights_of(partial_rounds), weights_of(whole), strict=True)
    ):
        assert torch.equal(now, ended if i in first_part else was), i
    assert partial_rounds.round_tokens == 0
    others = set(range(TINY.layers + 2)) - first_part
    rest = {part.fragment: part.payload for part in partial_rounds.end_round(encode, 0.3, others)}
    assert rest == {i: payload for i, payload in enumerate(payloads) if i not in first_part}
    assert state_digest(partial_rounds) == state_digest(whole)


def test_end_round_returns_freed_memory_before_large_buffers_alone(new_engine, monkeypatch):
    engine, returned = new_engine(), []
    monkeypatch.setattr("barnraise.swap.engine.return_freed_memory", lambda: returned.append(1))
    sizes = [4 * fragment.size for fragment in engine.fragments]
    assert min(sizes) < max(sizes)
    for limit, due, count in (
        (max(sizes), None, 0),
        (max(sizes) - 1, None, 1),
        (min(sizes), {sizes.index(min(sizes))}, 0),
        (min(sizes), {sizes.index(max(sizes))}, 1),
    ):
        monkeypatch.setattr("barnraise.swap.engine.SMALL_BUFFER_BYTES", limit)
        returned.clear()
        assert list(engine.end_round(encode, 0.3, due)) and len(returned) == count


def test_end_round_of_some_fragments_leaves_a_pending_step_pending(new_engine):
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
    assert engine.progress.optimizer_steps == 2
    assert all(torch.isfinite(weights).all() for weights in weights_of(engine))


@pytest.mark.parametrize("kind", KINDS)
def test_update_without_a_part_leaves_the_fragment_unchanged(kind, new_engine):
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
        units = arrived.decode(i)
        change = torch.zeros_like(was) if units is None else units
        assert torch.equal(now, was + change) and (i == 2) == bool(change.any())
    assert engine.anchor.vector == {arrived.header.author: 1} and len(replica) == len(before)


@pytest.mark.parametrize("kind", KINDS)
def test_machines_with_the_same_updates_have_the_same_bits_in_any_order(kind, new_engine):
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
    vector = {first.header.author: 1, second.header.author: 1}
    assert one.anchor.vector == two.anchor.vector == vector
    initial = Anchor([initial_weights(fragment, 11) for fragment in TINY.fragments()])
    assert one.anchor.digest() != initial.digest()


@pytest.mark.parametrize("clipping", ["exact", "layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_update_received_mid_round_does_not_count_as_own_progress(kind, clipping, new_engine):
    """Apply updates while steps run, and between them."""
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
def test_prediction_is_neither_in_own_progress_nor_in_the_anchor(kind, clipping, new_engine):
    """It moves the replica by the momentum, and is removed when the update itself arrives."""
    engine = new_engine(kind, dict(clipping=clipping))
    train_round(engine)
    engine.step([sample_text()])
    engine.step([sample_text(seed=1)], rate_scale=0.0)
    momentum = exchange_state(engine, "momentum")
    anchors = exchange_state(engine, "anchor")
    before = progress_of(engine)
    assert max(m.abs().max().item() for m in momentum) > 1e-3
    prediction = tuple(0.8 * (i % 2) for i in range(TINY.layers + 2))  # only for some blocks
    engine.queue_updates(prediction=prediction)
    for seed in (2, 3):
        engine.step([sample_text(seed=seed)], rate_scale=0.0)
    for was, now, m, g in zip(before, progress_of(engine), momentum, prediction, strict=True):
        torch.testing.assert_close(now, was + g * m, rtol=0, atol=2.5e-7)
    assert all(map(torch.equal, anchors, exchange_state(engine, "anchor")))
    other = train_round(new_engine(), "b", seed=2)
    engine.queue_updates(other, prediction=(0.0,) * len(prediction))
    for seed in (4, 5):
        engine.step([sample_text(seed=seed)], rate_scale=0.0)
    zeros = (0.0,) * len(prediction)
    assert engine.progress.prediction == engine.progress_with_pending.prediction == zeros
    for was, now in zip(before, progress_of(engine), strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=5e-7)
    assert engine.anchor.vector[other.header.author] == 1


@pytest.mark.parametrize("drop", [Engine.reset_round, Engine.reset_momentum])
@pytest.mark.parametrize("kind", KINDS)
def test_prediction_is_dropped_with_the_round_and_with_the_momentum(kind, drop, new_engine):
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
    """Return where each fragment's round began, without a prediction, minus the replica."""
    anchors, residuals = (exchange_state(engine, kind) for kind in ("anchor", "feedback"))
    shares = [int(share) for share in engine.progress.residual]
    parts = zip(anchors, residuals, shares, weights_of(engine), strict=True)
    return [
        units_to_float(anchor - share * residual) - replica
        for anchor, residual, share, replica in parts
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_is_equal_on_every_machine_with_the_same_anchor(kind, new_engine):
    held_out = [sample_text(8, seed=50), sample_text(3, seed=51)]
    one, two = new_engine(), new_engine(kind)
    update = train_round(one, seed=3)
    before = two.evaluate(held_out)
    two.step([sample_text()])
    assert two.evaluate(held_out) == before, "only the replica has moved"
    two.queue_updates(update)
    assert one.evaluate(held_out) == two.evaluate(held_out) != before
    one.reset_round()
    # After the reset, the replica is the anchor.
    losses = [one.step([batch], rate_scale=0.0).loss for batch in held_out]
    assert one.evaluate(held_out) == pytest.approx((8 * losses[0] + 3 * losses[1]) / 11, rel=1e-6)


def test_units_to_float_is_exact_where_a_float_can_hold_the_integer():
    units = torch.tensor(
        [0, 1, -1, 1 << 26, -(1 << 30), (1 << 24) + 1, 2**31 - 1], dtype=torch.int32
    )
    exact = np.array(units.tolist(), np.float64) / 2.0**UNIT_BITS
    assert units_to_float(units).tolist() == exact.astype(np.float32).astype(np.float64).tolist()


@pytest.mark.parametrize("kind", ["resident", "staged", "exact"])
def test_closed_engine_frees_its_memory_at_once(kind, new_engine):
    """The next engine is opened right after it, and memory does not hold two."""
    engine = new_engine(kind, plan={"dtype": "bfloat16"})
    engine.step([sample_text()])
    gradient, leaves = engine.buffers.gradient(0, -1), engine.buffers.leaves(0, -1)
    buffers = [weakref.ref(part) for part in (gradient.untyped_storage(), leaves)]
    buffers.append(weakref.ref(leaves.weights["token"]))
    del gradient, leaves
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert not any(buffer() is not None for buffer in buffers), "while the engine is there"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "retains"), [("resident", True), ("staged", True), ("exact", False)]
)
def test_engine_retains_freed_memory_where_no_state_is_on_disk(
    kind, retains, new_engine, monkeypatch
):
    choices = []
    monkeypatch.setattr("barnraise.swap.engine.retain_freed_memory", choices.append)
    new_engine(kind)
    assert choices == [retains]


# ---- interruption --------------------------------------------------------------------------------


def stop_at(call: int):
    """Return a callback that wants to stop from its n-th call on."""
    calls = iter(range(1, 1_000_000))
    return lambda: next(calls) >= call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [1, 4, 7])
def test_interrupted_step_leaves_the_steps_before_it(kind, call, new_engine):
    stopped, whole = new_engine(kind), new_engine(kind)
    for engine in (stopped, whole):
        for step in range(2):
            engine.step([sample_text(seed=step), sample_text(seed=9)], position=step + 1)
    stats = stopped.step([sample_text(), sample_text(seed=3)], should_stop=stop_at(call))
    assert stats.interrupted and not stats.abandoned and stats.tokens == 0
    stopped.flush(), whole.flush()
    assert stopped.progress == whole.progress
    assert state_digest(stopped) == state_digest(whole)
    assert stopped.step([sample_text()]).loss == whole.step([sample_text()]).loss


@pytest.mark.parametrize("kind", ["resident", "staged", "exact"])
def test_interrupted_step_applies_arrivals_and_is_not_counted(kind, new_engine):
    sender = new_engine()
    update = train_round(sender, author="b")
    engine = new_engine(kind, plan=dict(clipping="layer"))
    engine.step([sample_text()], position=1)
    engine.queue_updates(update)
    assert engine.step([sample_text()], position=2, should_stop=stop_at(1)).interrupted
    assert engine.progress.position == 1 and engine.round_tokens == 4 * TINY.context
    assert engine.anchor.vector == sender.anchor.vector
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(
            exchange_state(engine, "anchor"), exchange_state(sender, "anchor"), strict=True
        )
    )
    parts = [part.payload for part in engine.end_round(encode, 1.0)]
    assert len(parts) == TINY.layers + 2


def test_stopped_validation_has_no_loss(new_engine):
    engine = new_engine()
    assert math.isnan(engine.evaluate([sample_text(8)], stop_at(2)))
    assert engine.evaluate([sample_text(8)], stop_at(1000)) > 0
