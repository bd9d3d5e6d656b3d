"""What a plan is said to take on each tier, against what the store and the buffers allocate and what a step has torch
allocate, by the allocator's own record."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.plans import RECIPE, arbitrary_plans, engine_of, resident, sample_text, tiny_plan
from helpers.torch_allocations import peak_allocated
from hypothesis import given, settings

from barnraise.exchange.compression.codec import BLOCK, encode
from barnraise.planning import memory_model
from barnraise.spec import ModelSpec
from barnraise.swap import tile_threads
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.adamw import AdamWStep, sum_of_squares
from barnraise.swap.buffers import Buffers
from barnraise.swap.state_store import STATE_FILE, StateStore


def static_host(plan) -> int:
    """Of RAM, without what comes and goes."""
    moving = memory_model.between_steps(plan)
    if not plan.staged:
        moving = max(moving, memory_model.activations(plan))
    return memory_model.host_bytes(plan) - moving - plan.threads * memory_model.scratch_bytes(plan)


@settings(max_examples=60, deadline=None)
@given(plan=arbitrary_plans())
def test_the_store_and_the_buffers_allocate_to_the_byte_what_the_plan_says(plan, tmp_path_factory):
    for more in (
        {},
        {"moments_bits": 8},
        {"dtype": "bfloat16"},
        {"exchange": "disk"} if plan.on_disk else {},
    ):
        asked = replace(plan, **more)
        folder = tmp_path_factory.mktemp("state") if plan.on_disk else None
        store = StateStore(asked, folder)
        Buffers(asked, store)
        on_device = store.device.allocated
        if asked.staged:
            assert on_device == memory_model.device_bytes(asked) - memory_model.activations(asked)
        else:
            assert on_device == 0
        assert store.host.allocated == static_host(asked)
        if folder:
            assert (folder / STATE_FILE).stat().st_size == asked.file_bytes()
        store.close()


EIGHT, SPLIT = {"moments_bits": 8}, {"dtype": "bfloat16"}


@pytest.mark.parametrize("coded", [{}, EIGHT, SPLIT], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_scratch_that_is_counted_is_that_of_the_longest_tile_there_is(
    threads, coded, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for model in (*SHAPES, ModelSpec(layers=1, width=512, heads=8, context=8, vocabulary=256)):
        plan, sizes = resident(model, threads=threads, **coded), []
        for fragment in plan.fragments:
            tile_threads.for_each_tile(
                lambda _, __, tile, sizes=sizes: sizes.append(tile.numel()),
                torch.empty(fragment.size),
            )
        assert memory_model.scratch_bytes(plan) == 4 * memory_model.TILE_BUFFERS[
            plan.dtype, plan.moments_bits
        ] * max(sizes)


@pytest.mark.parametrize("coded", [{}, EIGHT, SPLIT, EIGHT | SPLIT], ids=str)
def test_a_thread_s_scratch_is_what_norms_and_updates_take(coded, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # all of it is one thread's
    plan = resident(SHAPES[0], threads=1, **coded)
    fragment = max(plan.fragments, key=lambda fragment: fragment.size)
    n, streamed = fragment.size, getattr(torch, plan.dtype)
    record = torch.zeros(plan.record_bytes("moments", n), dtype=torch.uint8)
    weights, gradient = (torch.randn(n).to(dtype) for dtype in (streamed, streamed))
    step = AdamWStep(fragment, 1, learning_rate=1e-3, weight_decay=0.1)

    def allocate_scratch() -> int:
        sum_of_squares(gradient.float())
        AdamMoments.of(plan, record, n).update(step, 0, weights, gradient)
        return tile_threads.scratch_bytes()

    with ThreadPoolExecutor(1) as fresh_thread:
        allocated = fresh_thread.submit(allocate_scratch).result()
    assert allocated == memory_model.scratch_bytes(plan)


SHAPES = [
    ModelSpec(layers=4, width=128, heads=4, context=64, vocabulary=512),
    ModelSpec(layers=6, width=96, heads=2, context=128, vocabulary=2048),
    ModelSpec(layers=2, width=256, heads=8, context=32, vocabulary=300),
]
KEEPING = [
    dict(),
    dict(retained_blocks=2),
    dict(kept_inputs="group"),
    dict(boundaries="host", staged=True, slots=1),
]
KEEPING += [
    dict(dtype="bfloat16", staged=True, slots=2),
    dict(dtype="bfloat16", staged=True, slots=2, retained_blocks=2),
]


def shaped(model: ModelSpec, micro_batches: int, **more):
    threads = torch.get_num_threads()
    plan = resident(
        model,
        micro_batches,
        **{"sequences": 4, "threads": threads, "host_gradient_slots": model.layers, **more},
    )
    if plan.kept_inputs == "group":
        pairs = tuple((i, i + 1) for i in range(1, model.layers + 1, 2))
        plan = replace(plan, forward_groups=pairs, backward_groups=pairs[::-1], gradient_slots=3)
    return plan


@pytest.mark.parametrize("more", KEEPING, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("model", SHAPES, ids=["d128", "d96", "d256"])
def test_step_memory_is_at_most_predicted_and_within_five_percent(model, micro_batches, more):
    plan = shaped(model, micro_batches, **more)
    engine = engine_of(plan, recipe=RECIPE)
    batches = list(sample_text(4 * micro_batches, model=model).split(4))
    engine.step(batches)  # the first makes what is made once
    measured = peak_allocated(lambda: engine.step(batches))
    said = memory_model.activations(plan)
    whole = engine.store.host.allocated + engine.store.device.allocated
    engine.close()
    assert measured <= said, f"{measured - said:,} bytes more than was said"
    assert whole + said <= (whole + measured) * 1.05, f"{said:,} were said, {measured:,} taken"


FORMS = ["dense8", "dense4", "dense2", "top64x2", "top64x8"]


def consume(updates) -> None:
    """As `Exchange.publish` does: nothing is held while the next is made."""
    for update in updates:
        del update


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["resident", "staged", "exact", "staged disk"])
@pytest.mark.parametrize("model", SHAPES, ids=["d128", "d96", "d256"])
def test_what_is_done_between_steps_takes_no_more_than_is_said(model, kind, dtype, tmp_path):
    assert memory_model.CODEC_ELEMENTS == BLOCK
    plan = tiny_plan(
        kind, model, dtype=dtype, **({"tile": 1 << 15} if "disk" in kind or kind == "exact" else {})
    )
    engine = engine_of(plan, tmp_path)
    engine.step([sample_text(4, model=model)])
    held_out = [sample_text(memory_model.HELD_OUT, model=model)]
    said = memory_model.between_steps(plan)
    for call in (
        lambda: engine.evaluate(held_out),
        *(
            lambda form=form: consume(engine.end_round(partial(encode, scheme=form), 1.0))
            for form in FORMS
        ),
        engine.reset_round,
    ):
        measured = peak_allocated(call)
        assert measured <= said, f"{measured - said:,} bytes more than was said"
    engine.close()
