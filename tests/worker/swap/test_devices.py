"""Several devices over one host copy: their bits, and what happens when one of them fails.

The devices are windows of RAM, and each computes in a thread of its own.
"""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
from helpers.effort import examples, one_in
from helpers.paths import ROOT
from helpers.worker.llama_models import QWEN, UNTIED
from helpers.worker.plans import bitwise

from barnraise.errors import DeviceLostError, MemoryShortageError
from barnraise.planning import memory_model
from barnraise.planning.program import OperationKind
from barnraise.spec import OPTIMIZERS

sys.path.append(str(ROOT / "benchmarks" / "swap"))
from dealt_reference import dealt, run_one_after_the_other

DEALS = [(1, 1), (3, 1), (2, 1, 1), (2, 2, 2, 2)]
STAGED = ("memory", "staged disk")
STEPS = examples(30, exhaustive=100)


@pytest.fixture(autouse=True)
def one_thread(restored_threads):
    torch.set_num_threads(1)


def plan_of(counts, tier="memory", clipping="exact", optimizer="adamw", model=bitwise.MODEL):
    """Return a plan whose micro-batches are dealt to so many windows of RAM."""
    case = bitwise.Case(sum(counts), tier, clipping, 9, 20, optimizer)
    return dealt(case.plan(model), counts)


@pytest.mark.parametrize("counts", one_in(2, [(deal,) for deal in DEALS]), ids=str)
def test_devices_have_the_bits_of_one_after_the_other(counts):
    for clipping, optimizer in itertools.product(bitwise.CLIPPINGS, OPTIMIZERS):
        expected = run_one_after_the_other(bitwise.MODEL, counts, clipping, 3, optimizer)
        for tier in STAGED:
            found = bitwise.run_plan(plan_of(counts, tier, clipping, optimizer), 3)
            assert bitwise.equal_bits(found, expected), (tier, clipping, optimizer)


@pytest.mark.parametrize("model", [UNTIED, QWEN], ids=["untied", "qwen"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_llama_on_devices_has_the_bits_of_one_after_the_other(model, optimizer):
    found = bitwise.run_plan(plan_of((3, 1), "memory", "layer", optimizer, model), 3)
    expected = run_one_after_the_other(model, (3, 1), "layer", 3, optimizer)
    assert bitwise.equal_bits(found, expected)


def test_two_runs_on_three_devices_have_the_same_bits():
    plan = plan_of((2, 1, 1), clipping="layer")
    assert bitwise.equal_bits(bitwise.run_plan(plan, 12), bitwise.run_plan(plan, 12))


@pytest.mark.parametrize("optimizer", one_in(2, OPTIMIZERS))
def test_loss_follows_that_of_one_device(optimizer):
    """Only the order of summation differs."""
    model = replace(bitwise.MODEL, layers=2)
    case = bitwise.Case(4, "memory", "exact", 1, 1, optimizer)
    one = bitwise.run_plan(case.plan(model), STEPS)[0]
    several = bitwise.run_plan(dealt(case.plan(model), (2, 1, 1)), STEPS)[0]
    assert several == pytest.approx(one, rel=1e-5) and one[-1] < one[0]


@pytest.mark.parametrize("clipping", bitwise.CLIPPINGS)
def test_step_that_ends_early_leaves_the_devices_usable(clipping):
    """An exactly clipped step changes nothing then: the state is that of the steps before it."""
    plan = plan_of((2, 1, 1), clipping=clipping)
    engine = bitwise.open_engine(plan)
    bitwise.train(engine, 1)
    expected = bitwise.read_state(engine)
    polls = itertools.count()
    batch = bitwise.sample_text(plan.model, bitwise.SEQUENCES, seed=1)
    stats = engine.step(
        list(batch.split(plan.sequences)), position=2, should_stop=lambda: next(polls) > 9
    )
    assert stats.interrupted
    state = bitwise.read_state(engine)
    if clipping == "exact":
        assert all(map(torch.equal, state, expected))
    assert math.isfinite(bitwise.train(engine, 1, first=1)[0])
    engine.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("CUDA error: unspecified launch failure\nmore", DeviceLostError),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", MemoryShortageError),
    ],
)
@pytest.mark.parametrize("kind", [OperationKind.BACKWARD, OperationKind.LOAD])
def test_device_that_fails_is_named_and_nothing_is_applied(text, error, kind):
    plan = plan_of((2, 1, 1))
    engine = bitwise.open_engine(plan)
    bitwise.train(engine, 1)
    expected = bitwise.read_state(engine)
    original = engine.executor.handlers[kind]
    raised = torch.OutOfMemoryError if "memory" in text else RuntimeError

    def failing(op):
        call = original(op)

        def fail() -> None:
            raise raised(text)

        return fail if op.device == 2 else call

    engine.executor.handlers[kind] = failing
    with pytest.raises(error) as caught:
        bitwise.train(engine, 1, first=1)
    assert f"the {kind} of " in str(caught.value) and " on cpu failed" in str(caught.value)
    if isinstance(caught.value, DeviceLostError):
        assert caught.value.device == "cpu"
    tile = [engine.store.memory_buffer("weights", i) for i in plan.blocks]
    for i, weights in zip(plan.blocks, tile, strict=True):
        assert torch.equal(weights.view(torch.float32)[: plan.fragments[i].size], expected[3 * i])
    engine.close()


@pytest.mark.parametrize("clipping", ["exact", "layer"])
def test_gradient_not_finite_on_one_device_drops_the_step(clipping):
    plan = plan_of((2, 1, 1), clipping=clipping)
    engine = bitwise.open_engine(plan)
    bitwise.train(engine, 1)
    original = engine.executor.handlers[OperationKind.HEAD]

    def poisoned(op):
        call = original(op)

        def head() -> None:
            call()
            if op.device == 1:
                engine.buffers.others[0].head_gradient[0, 0] = torch.inf

        return head

    engine.executor.handlers[OperationKind.HEAD] = poisoned
    assert bitwise.train(engine, 1, first=1) and not engine.round_tokens
    engine.executor.handlers[OperationKind.HEAD] = original
    assert math.isfinite(bitwise.train(engine, 1, first=2)[0])
    assert all(torch.isfinite(tensor).all() for tensor in bitwise.read_state(engine))
    engine.close()


def test_windows_take_what_the_plan_says():
    plan = plan_of((3, 1))
    engine = bitwise.open_engine(plan)
    whole = memory_model.all_device_bytes(plan)
    for number, share in enumerate(plan.device_plans):
        static = engine.buffers.on(number).arena.allocated
        assert static + memory_model.activations(share) == whole[number]
    engine.close()
