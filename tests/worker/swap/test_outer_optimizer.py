"""Test that a round of the outer optimizer has the bits of its formulas, written in numpy."""

import numpy as np
import pytest
import torch
from helpers.effort import one_in
from helpers.worker.plans import KINDS, TINY, exchange_state, sample_text, tiny_plan, weights_of
from hypothesis import given
from hypothesis import strategies as st

from barnraise.ledger.codec import encode
from barnraise.spec import ModelSpec, Recipe
from barnraise.swap.outer_optimizer import OuterOptimizer, RoundStart
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.swap.tiles import Tiles

UNIT = 2.0**-26
SMALL = ModelSpec(layers=1, width=16, heads=1, context=8, vocabulary=256)
BLOCK = 1  # index of the only block's fragment, whose tiles have a rest


class FragmentInNumpy:
    """One fragment of one author in fp32 and int64, by the formulas of `OuterOptimizer`.

    Attributes:
        anchor: the anchor in units, modulo 2³².
        momentum: the outer momentum m, fp32.
        feedback: the error feedback e in units.
        step_sum: the sum of the rounded steps, in units.
    """

    def __init__(self, anchor: np.ndarray, recipe: Recipe) -> None:
        self.recipe = recipe
        self.anchor = anchor.astype(np.int64)
        self.momentum = np.zeros(anchor.size, np.float32)
        self.feedback = np.zeros(anchor.size, np.int64)
        self.step_sum = np.zeros(anchor.size, np.int64)
        self._had_momentum = True

    def replica(self, start: RoundStart) -> np.ndarray:
        """Return where a round begins: anchor − r · e − g · m."""
        units = as_int32(self.anchor - start.has_residual * self.feedback)
        begin = units.astype(np.float32) * np.float32(UNIT)
        return begin - self.momentum * np.float32(start.prediction)

    def accumulate(
        self, replica: np.ndarray, weight: float, start: RoundStart, has_momentum: bool
    ) -> None:
        """Add what a round has learnt to the momentum and to the error feedback."""
        rate, decay = self.recipe.outer_rate, np.float32(self.recipe.outer_momentum)
        delta = np.float32(weight) * (self.replica(start) - replica)
        if has_momentum:
            before = self.momentum if self._had_momentum else np.zeros_like(delta)
            self.momentum = before * decay + delta
            step = (self.momentum * decay + delta) * np.float32(rate)
        else:
            share = min(1.0, rate * (1 + self.recipe.outer_momentum))
            self.momentum = delta * np.float32(share / rate)
            step = delta * np.float32(share)
        self._had_momentum = has_momentum
        rounded = np.rint(step.astype(np.float64) / UNIT).clip(-(2**29), 2**29).astype(np.int64)
        kept = np.rint(self.recipe.feedback_decay * self.feedback).astype(np.int64)
        self.feedback = (kept + rounded).clip(-(2**30), 2**30)
        self.step_sum += rounded

    def publish(self, units: np.ndarray) -> None:
        """Move what the update holds, −C(e), from the error feedback to the anchor."""
        self.feedback += units
        self.anchor = as_int32(self.anchor + units)


def as_int32(units: np.ndarray) -> np.ndarray:
    """Return integers modulo 2³², as int64 in the range of int32."""
    return units.astype(np.int32).astype(np.int64)


@st.composite
def rounds(draw) -> tuple[float, RoundStart, bool, float, float, int]:
    """Draw a round: weight, start, whether it has momentum, way learnt, share sent and seed."""
    start = RoundStart(draw(st.sampled_from([0.0, 0.3, 1.7])), draw(st.booleans()))
    return (
        draw(st.floats(0.0, 1.0)),
        start,
        draw(st.booleans()),
        10.0 ** draw(st.integers(-9, 1)),
        draw(st.sampled_from([0.0, 0.02, 1.0])),
        draw(st.integers(0, 2**32 - 1)),
    )


@given(
    st.builds(
        Recipe,
        outer_rate=st.floats(0.05, 1.5),
        outer_momentum=st.floats(0.0, 0.95),
        feedback_decay=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    ),
    st.lists(rounds(), min_size=1, max_size=4),
    st.sampled_from([1024, 1 << 22]),
)
def test_rounds_have_the_bits_of_the_formulas_in_numpy(recipe, drawn, tile):
    """Whatever is learnt and sent, whatever the tiles: the tolerance is zero."""
    plan = tiny_plan(model=SMALL, tile=tile)
    store = StateStore(plan, None)
    tiles = Tiles(store)
    optimizer = OuterOptimizer(recipe, store, tiles)
    state = {kind: FragmentSequence(store, kind) for kind in ("anchor", "feedback")}
    state["momentum"] = FragmentSequence(store, "momentum", torch.float32)
    size = plan.fragments[BLOCK].size
    random = np.random.default_rng(1)
    anchor = random.integers(-(2**31), 2**31, size, np.int64).astype(np.int32)
    for kind, initial in (("anchor", anchor), ("feedback", 0 * anchor), ("momentum", 0.0 * anchor)):
        state[kind][BLOCK] = torch.from_numpy(initial).to(state[kind][BLOCK].dtype)
    expected, begun, had_momentum, sent_sum = FragmentInNumpy(anchor, recipe), RoundStart(), True, 0

    for weight, start, has_momentum, way, share, seed in drawn:
        random = np.random.default_rng(seed)
        learnt = (way * random.standard_normal(size)).astype(np.float32)
        replica = expected.replica(begun) + learnt
        for part in tiles.iterate(BLOCK):
            part.set_master(torch.from_numpy(replica[part.begin : part.end].copy()))
        begun = RoundStart(begun.prediction, begun.has_residual, not had_momentum)
        values = torch.empty(size, dtype=torch.int32)
        optimizer.accumulate(BLOCK, values, weight, begun, has_momentum)
        expected.accumulate(replica, weight, begun, has_momentum)
        assert np.array_equal(values.numpy(), -expected.feedback)

        units = np.where(random.random(size) < share, values.numpy(), 0)
        optimizer.apply_published(BLOCK, values, torch.from_numpy(units).to(torch.int32), start)
        expected.publish(units)
        sent_sum = sent_sum + units.astype(np.int64)
        for kind, fragments in state.items():
            assert np.array_equal(fragments[BLOCK].numpy(), getattr(expected, kind)), kind
        replica = torch.cat([part.master().clone() for part in tiles.iterate(BLOCK, changes=False)])
        assert np.array_equal(replica.numpy(), expected.replica(start))
        begun, had_momentum = start, has_momentum
    if recipe.feedback_decay == 1.0 and abs(expected.step_sum).max() < 2**29:
        assert np.array_equal(expected.feedback - sent_sum, expected.step_sum), (
            "all that was sent and the residual are the sum of the rounded steps"
        )
    store.close()


ROUNDS = [*((kind, 0.9, 0.0) for kind in KINDS), ("resident", 1.0, 0.0), ("exact", 1.0, 0.0)]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("carried", "momentous"),
    [((0, 0, 0), (1, 1, 1)), ((1, 1, 0), (1, 1, 1)), ((0, 0, 1), (1, 0, 1))],
    ids=["dense", "sparse, then dense", "short, long, short"],
)
@pytest.mark.parametrize(
    ("kind", "decay", "scale"), one_in(3, ROUNDS + [(kind, 1.0, 0.7) for kind in KINDS])
)
def test_rounds_of_an_engine_have_the_bits_of_the_formulas_in_numpy(
    kind, decay, scale, carried, momentous, new_engine
):
    """The same on every tier, with steps and the real codec; predictions grow during a round."""
    engine = new_engine(kind, outer_rate=0.7, outer_momentum=0.6, feedback_decay=decay)
    recipe = Recipe(outer_rate=0.7, outer_momentum=0.6, feedback_decay=decay)
    count = TINY.layers + 2
    expected = [
        FragmentInNumpy(units.numpy(), recipe) for units in exchange_state(engine, "anchor")
    ]
    for seq in range(1, 4):
        for step in range(3):
            engine.step([sample_text(seed=10 * seq + step)])
            engine.queue_updates(
                prediction=tuple(scale * (seq + step) * (i + 1) / count for i in range(count))
            )
        engine.flush()
        engine.apply_queued()
        replicas = [weights.numpy() for weights in weights_of(engine)]
        carries, has_momentum = bool(carried[seq - 1]), bool(momentous[seq - 1])
        parts = [
            (part.payload, part.units.numpy().copy())
            for part in engine.end_round(encode, 0.3, None, carries, has_momentum)
        ]
        assert len(parts) == count and engine.round_tokens == 0
        replicas_after = weights_of(engine)
        for i, (fragment, (payload, units)) in enumerate(zip(expected, parts, strict=True)):
            prediction = scale * (seq + 2) * (i + 1) / count
            begun = RoundStart(prediction, bool(seq > 1 and carried[seq - 2]))
            fragment.accumulate(replicas[i], 0.3, begun, has_momentum)
            coded = encode(torch.from_numpy(-fragment.feedback).to(torch.int32))
            assert payload == coded[0] and np.array_equal(units, coded[1].numpy())
            fragment.publish(units)
            after = fragment.replica(RoundStart(prediction, carries))
            assert np.array_equal(replicas_after[i].numpy(), after)
        for name in ("anchor", "momentum", "feedback"):
            for fragment, values in zip(expected, exchange_state(engine, name), strict=True):
                assert np.array_equal(values.numpy(), getattr(fragment, name)), name
    assert any(fragment.feedback.any() for fragment in expected), "this test needs a lossy codec"
