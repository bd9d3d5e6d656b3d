"""The memory model agrees with what the store, the buffers and a step allocate on each tier."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.cuda.torch_allocations import peak_allocated
from helpers.effort import examples, one_in
from helpers.worker.plans import (
    RECIPE,
    arbitrary_plans,
    engine_of,
    resident,
    sample_text,
    stage_plans,
    tiny_plan,
)
from hypothesis import given, settings

from barnraise.ledger.codec import BLOCK, encode
from barnraise.planning import memory_model
from barnraise.planning.plan import Plan, moments_part_bytes
from barnraise.planning.program import LaneName
from barnraise.spec import MAX_PROMPTS, ModelSpec
from barnraise.swap import tile_threads
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.adamw import AdamWStep, sum_of_squares
from barnraise.swap.buffers import Buffers
from barnraise.swap.lanes import WorkerLane
from barnraise.swap.sampler import SamplingSettings, TokenRange
from barnraise.swap.state_store import STATE_FILE, StateStore

SHAPES = [
    ModelSpec(layers=4, width=128, heads=4, context=64, vocabulary=512),
    ModelSpec(layers=6, width=96, heads=2, context=128, vocabulary=2048),
    ModelSpec(layers=2, width=256, heads=8, context=32, vocabulary=300),
]
ONE_SHAPE = one_in(len(SHAPES), SHAPES)


def width_of(model: ModelSpec) -> str:
    """Return the name of a case."""
    return f"d{model.width}"


EIGHT_BIT_MOMENTS = {"moments_bits": 8}
BFLOAT16 = {"dtype": "bfloat16"}
PLAN_VARIANTS = [
    {},
    {"retained_blocks": 2},
    {"kept_inputs": "group"},
    {"boundaries": "host", "staged": True, "slots": 1},
    {"boundaries": "host", "near_inputs": 2, "staged": True, "slots": 1},
    {"dtype": "bfloat16", "staged": True, "slots": 2},
    {"dtype": "bfloat16", "staged": True, "slots": 2, "retained_blocks": 2},
    {"optimizer": "muon"},
    {"optimizer": "muon", "clipping": "layer", "gradient_slots": 3, "dtype": "bfloat16"},
]
SCHEMES = ["dense8", "dense4", "dense2", "top64x2", "top64x8"]


def static_host_bytes(plan: Plan) -> int:
    """Return the predicted bytes of RAM that stay allocated from step to step."""
    other = memory_model.saving_bytes if plan.staged else memory_model.activations
    temporary = max(memory_model.between_steps(plan), other(plan))
    scratch = plan.threads * memory_model.scratch_bytes(plan)
    waiting = memory_model.boundary_bytes(plan)
    return memory_model.host_bytes(plan) - temporary - scratch - waiting


@settings(max_examples=examples(20, exhaustive=60), deadline=None)
@given(plan=arbitrary_plans() | stage_plans())
def test_store_and_buffers_allocate_exactly_the_predicted_bytes(plan, tmp_path_factory):
    exchange_on_disk = {"exchange": "disk"} if plan.on_disk else {}
    for changes in ({}, EIGHT_BIT_MOMENTS, BFLOAT16, exchange_on_disk):
        variant = replace(plan, **changes)
        folder = tmp_path_factory.mktemp("state") if plan.on_disk else None
        store = StateStore(variant, folder)
        Buffers(variant, store)
        predicted = 0
        if variant.staged:
            predicted = memory_model.device_bytes(variant) - memory_model.activations(variant)
        assert store.device.allocated == predicted
        assert store.host.allocated == static_host_bytes(variant)
        if folder:
            assert (folder / STATE_FILE).stat().st_size == variant.file_bytes()
        store.close()


@pytest.mark.parametrize("formats", [{}, EIGHT_BIT_MOMENTS, BFLOAT16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_predicted_scratch_is_that_of_the_longest_tile(threads, formats, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for model in (*SHAPES, ModelSpec(layers=1, width=512, heads=8, context=8, vocabulary=256)):
        plan = resident(model, threads=threads, **formats)
        sizes: list[int] = []
        for fragment in plan.fragments:
            tile_threads.for_each_tile(
                lambda _, __, tile, sizes=sizes: sizes.append(tile.numel()),
                torch.empty(fragment.size),
            )
        buffers = memory_model.TILE_BUFFERS[plan.dtype, plan.moments_bits]
        assert memory_model.scratch_bytes(plan) == 4 * buffers * max(sizes)


@pytest.mark.parametrize(
    "formats", [{}, EIGHT_BIT_MOMENTS, BFLOAT16, EIGHT_BIT_MOMENTS | BFLOAT16], ids=str
)
def test_scratch_of_a_thread_is_what_norms_and_updates_allocate(formats, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # one thread allocates all scratch
    plan = resident(SHAPES[0], threads=1, **formats)
    fragment = max(plan.fragments, key=lambda fragment: fragment.size)
    size = fragment.size
    parts = moments_part_bytes(size, size, plan.moments_bits, plan.dtype)
    record = torch.zeros(sum(parts), dtype=torch.uint8)
    weights, gradient = torch.randn(2, size).to(getattr(torch, plan.dtype))
    step = AdamWStep(fragment, 1, learning_rate=1e-3, weight_decay=0.1)

    def allocate_scratch() -> int:
        sum_of_squares(gradient.float())
        AdamMoments.of(plan, record, size, size).update(step, 0, weights, gradient)
        return tile_threads.scratch_bytes()

    with ThreadPoolExecutor(1) as fresh_thread:
        allocated = fresh_thread.submit(allocate_scratch).result()
    assert allocated == memory_model.scratch_bytes(plan)


def plan_of(model: ModelSpec, micro_batches: int, **changes) -> Plan:
    """Return a resident plan of four sequences a micro-batch, with changes."""
    fields = {
        "sequences": 4,
        "threads": torch.get_num_threads(),
        "host_gradient_slots": model.layers,
    }
    plan = resident(model, micro_batches, **{**fields, **changes})
    if plan.kept_inputs == "group":
        pairs = tuple((i, i + 1) for i in range(1, model.layers + 1, 2))
        plan = replace(plan, forward_groups=pairs, backward_groups=pairs[::-1], gradient_slots=3)
    return plan


@pytest.mark.parametrize("changes", PLAN_VARIANTS, ids=str)
@pytest.mark.parametrize("micro_batches", one_in(2, [4, 1]))
@pytest.mark.parametrize("model", ONE_SHAPE, ids=width_of)
def test_step_memory_is_at_most_predicted_and_within_five_percent(model, micro_batches, changes):
    plan = plan_of(model, micro_batches, **changes)
    engine = engine_of(plan, recipe=RECIPE)
    batches = list(sample_text(4 * micro_batches, model=model).split(4))
    engine.step(batches)  # the first step allocates what lasts
    measured = peak_allocated(lambda: engine.step(batches))
    predicted = memory_model.activations(plan)
    static = engine.store.host.allocated + engine.store.device.allocated
    engine.close()
    assert measured <= predicted, f"{measured - predicted:,} bytes more than predicted"
    assert static + predicted <= (static + measured) * 1.05, (
        f"{predicted:,} bytes were predicted, {measured:,} allocated"
    )


@pytest.mark.parametrize(
    ("lane", "micro_batches"), [(LaneName.OUT, 1), (LaneName.OUT, 4), (LaneName.IN, 1)]
)
def test_step_memory_is_at_most_predicted_if_a_lane_is_slow(lane, micro_batches, monkeypatch):
    """A busy machine lets the copies of one lane lag behind."""
    model = ModelSpec(layers=4, width=128, heads=4, context=64, vocabulary=512)
    plan = plan_of(model, micro_batches, boundaries="host", staged=True, slots=1)
    engine = engine_of(plan, recipe=RECIPE)
    batches = list(sample_text(4 * micro_batches, model=model).split(4))
    engine.step(batches)
    submit = WorkerLane.submit

    def submit_slowly(self, call, *arguments, **options):
        def run_slowly() -> object:
            time.sleep(0.03)
            return call()

        return submit(self, run_slowly if self.name == lane else call, *arguments, **options)

    monkeypatch.setattr(WorkerLane, "submit", submit_slowly)
    measured = peak_allocated(lambda: engine.step(batches))
    engine.close()
    predicted = memory_model.activations(plan)
    assert measured <= predicted, f"{measured - predicted:,} bytes more than predicted"


def consume(parts) -> None:
    """Release each part before the next one is encoded, as the exchange does."""
    for part in parts:
        del part


@pytest.mark.parametrize("changes", one_in(3, [{}, BFLOAT16, {"optimizer": "muon"}]), ids=str)
@pytest.mark.parametrize("kind", ["resident", "staged", "exact", "staged disk"])
@pytest.mark.parametrize("model", ONE_SHAPE, ids=width_of)
def test_memory_between_steps_is_as_predicted(model, kind, changes, tmp_path):
    assert memory_model.CODEC_ELEMENTS == BLOCK
    tile = {"tile": 1 << 15} if kind in ("exact", "staged disk") else {}
    plan = tiny_plan(kind, model, **changes, **tile)
    engine = engine_of(plan, tmp_path)
    engine.step([sample_text(4, model=model)])
    held_out = [sample_text(memory_model.HELD_OUT, model=model)]
    predicted = memory_model.between_steps(plan)

    def end_round(scheme: str) -> None:
        consume(engine.end_round(partial(encode, scheme=scheme), 1.0))

    def write_samples() -> None:
        prompts = [[1] * (model.context - 2)] * MAX_PROMPTS
        vocabulary = TokenRange(model.vocabulary, end=0)
        consume(engine.generate(prompts, SamplingSettings(tokens=2), vocabulary))

    calls = [
        lambda: engine.evaluate(held_out),
        write_samples,
        *(partial(end_round, scheme) for scheme in SCHEMES),
        engine.reset_round,
    ]
    measured = max(map(peak_allocated, calls))
    engine.close()
    assert measured <= predicted, f"{measured - predicted:,} bytes more than predicted"
