"""Tests that a swapped run of Llama's architecture has the bits of the resident run."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.effort import one_in
from helpers.worker import llama_models
from helpers.worker.plans import bitwise

UNTIED = replace(llama_models.UNTIED, layers=8, width=16, hidden=40, context=8, vocabulary=256)
QWEN = replace(UNTIED, head_size=8, qk_norm=True, tied_head=True)
GROUPINGS = 1 << UNTIED.layers - 1
COMBINATIONS = list(
    itertools.product((UNTIED, QWEN), bitwise.TIERS, bitwise.CLIPPINGS, bitwise.MICRO_BATCHES[:3])
)
# Every combination of model, tier, clipping and micro-batches, with groupings that differ.
CASES = [
    (model, bitwise.Case(m, tier, clipping, (37 * k + 11) % GROUPINGS, (53 * k) % GROUPINGS))
    for k, (model, tier, clipping, m) in enumerate(COMBINATIONS)
]


@pytest.fixture(autouse=True)
def one_thread(restored_threads):
    torch.set_num_threads(1)


@pytest.mark.parametrize("part", one_in(7, range(7)))
def test_swapped_llama_has_the_bits_of_the_resident_one(part):
    for model, case in CASES[part::7]:
        expected = bitwise.reference_run(model, case.micro_batches, case.clipping, 3)
        assert bitwise.equal_bits(bitwise.run_plan(case.plan(model), 3), expected), case


@pytest.mark.parametrize("model", [UNTIED, QWEN], ids=["untied", "qwen"])
@pytest.mark.parametrize(
    "changes",
    [
        dict(retained_blocks=3),
        dict(boundaries="host", staged=True),
        dict(dtype="bfloat16", moments_bits=8),
    ],
    ids=str,
)
def test_recomputation_offload_and_fewer_bits_change_no_bit(model, changes):
    case = bitwise.Case(2, "memory", "exact", 5, 9)
    narrow = {name: changes[name] for name in ("dtype", "moments_bits") if name in changes}
    expected = bitwise.run_plan(bitwise.resident_plan(model, 2, **narrow), 4)
    plan = case.plan(model)
    if "retained_blocks" in changes:
        plan = replace(plan, staged=False)
    assert bitwise.equal_bits(bitwise.run_plan(replace(plan, **changes), 4), expected)


@pytest.mark.parametrize("model", [UNTIED, QWEN], ids=["untied", "qwen"])
def test_loss_of_a_llama_falls(model):
    losses, _ = bitwise.run_plan(bitwise.resident_plan(model), 20)
    assert losses[-1] < losses[0] - 0.2
