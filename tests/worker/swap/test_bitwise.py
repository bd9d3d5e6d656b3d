"""Tests that a swapped run has the bits of the resident run, and that both match torch's AdamW."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.effort import examples, one_in
from helpers.worker.plans import bitwise, from_disk, resident

from barnraise.models.functions import FUNCTIONS, head
from barnraise.models.weights import views
from barnraise.spec import ModelSpec
from barnraise.swap.adamw import BETA1, BETA2, EPSILON
from barnraise.swap.precision import units_to_float

GPT = FUNCTIONS["gpt2"]

COMBINATIONS = list(itertools.product(bitwise.TIERS, bitwise.CLIPPINGS, bitwise.MICRO_BATCHES))
GROUPINGS = 1 << bitwise.MODEL.layers - 1
CHEAP = itertools.cycle([combination for combination in COMBINATIONS if combination[2] <= 2])
SAMPLE = [  # every grouping of forward and of backward, and every combination
    bitwise.Case(m, tier, clipping, forward=(37 * k + 11) % GROUPINGS, backward=k)
    for k, (tier, clipping, m) in enumerate(
        itertools.islice(itertools.chain(COMBINATIONS, CHEAP), GROUPINGS)
    )
]
# These run for 20 steps, the others until updates depend on earlier updates.
LONG = SAMPLE[3:48:5]


@pytest.fixture(autouse=True)
def one_thread(restored_threads):
    torch.set_num_threads(1)


def test_sample_covers_every_grouping_and_every_combination():
    assert (
        {case.backward for case in SAMPLE}
        == {case.forward for case in SAMPLE}
        == set(range(GROUPINGS))
    )
    assert {(case.tier, case.clipping, case.micro_batches) for case in SAMPLE} == set(COMBINATIONS)
    for parts in zip(*((c.tier, c.clipping, c.micro_batches) for c in LONG), strict=True):
        assert set(parts) in (
            set(bitwise.TIERS),
            set(bitwise.CLIPPINGS),
            set(bitwise.MICRO_BATCHES),
        )


@pytest.mark.parametrize("quarter", one_in(4, range(4)))
def test_swapped_run_has_the_bits_of_the_resident_run(quarter):
    for case in SAMPLE[quarter::4]:
        assert bitwise.matches_reference(case, steps=3), case


@pytest.mark.parametrize("case", one_in(3, LONG), ids=str)
def test_swapped_run_has_the_same_bits_after_twenty_steps(case):
    assert bitwise.matches_reference(case, steps=20)


IN_MEMORY = bitwise.Case(2, "memory", "exact", 5, 9)
ON_DISK = bitwise.Case(2, "disk exact", "exact", 3, 85)
MIXED = [
    *((IN_MEMORY, dict(staged=False, retained_blocks=blocks)) for blocks in (8, 3)),
    (IN_MEMORY, dict(staged=False, retained_blocks=3, kept_inputs="group")),
    (IN_MEMORY, dict(boundaries="host", staged=True)),
    (IN_MEMORY, dict(boundaries="host", near_inputs=3, staged=True)),
    (ON_DISK, dict(weights=("host",) * 10)),
    (ON_DISK, dict(moments=("host",) * 10)),
    (
        ON_DISK,
        dict(
            weights=("host", *["disk", "host"] * 4, "host"),
            moments=("disk", *["host", "disk"] * 4, "host"),
        ),
    ),
    (ON_DISK, dict(gradients="host", exchange="host")),
    (ON_DISK, dict(gradients="host", staged=True, host_gradient_slots=8)),
    (
        ON_DISK,
        dict(
            weights=("host",) * 10,
            moments=("host",) * 10,
            staged=True,
            gradients="host",
            host_gradient_slots=8,
        ),
    ),
]


@pytest.mark.parametrize(("case", "more"), one_in(3, MIXED), ids=str)
def test_recomputation_offload_and_mixed_tiers_change_no_bit(case, more):
    assert bitwise.equal_bits(
        bitwise.run_plan(replace(case.plan(), **more), 4),
        bitwise.reference_run(bitwise.MODEL, 2, "exact", 4),
    )


# ---- fewer bits ----------------------------------------------------------------------------------

SMALL = ModelSpec(layers=3, width=32, heads=4, context=16, vocabulary=300)
NARROW = [dict(dtype="bfloat16"), dict(moments_bits=8), dict(dtype="bfloat16", moments_bits=8)]


@pytest.mark.parametrize("clipping", one_in(2, ["exact", "layer"]))
@pytest.mark.parametrize("bits", NARROW, ids=str)
def test_split_weights_and_8bit_moments_swap_with_the_same_bits(bits, clipping):
    """Compare staged, from disk, and staged from disk with the resident run."""
    steps = examples(3, exhaustive=6)
    expected = bitwise.run_plan(resident(clipping=clipping, micro_batches=2, **bits), steps)
    for tier in ("memory", "disk exact", "staged disk"):
        plan = replace(bitwise.Case(2, tier, clipping, 9, 20).plan(), **bits)
        assert bitwise.equal_bits(bitwise.run_plan(plan, steps), expected), tier


@pytest.mark.parametrize("bits", NARROW, ids=str)
def test_loss_falls_nearly_as_fast_with_fewer_bits(bits):
    narrow, wide = (bitwise.run_plan(resident(SMALL, **kind), 20)[0] for kind in (bits, {}))
    assert wide[-1] < wide[0] - 0.5 and narrow[-1] == pytest.approx(wide[-1], abs=0.1)


def test_split_weights_differ_only_by_the_rounding_of_products():
    wide, split = (bitwise.run_plan(resident(dtype=dtype), 6) for dtype in ("float32", "bfloat16"))
    assert wide[0] == pytest.approx(split[0], rel=5e-3) and wide[0] != split[0]


# ---- torch's AdamW -------------------------------------------------------------------------------


def train_with_autograd(clipping: str, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Train by one graph a step, `F.cross_entropy` on whole logits, and torch.optim.AdamW."""
    recipe = bitwise.RECIPE
    layers = [views(f, units_to_float(bitwise.initial_units(f))) for f in SMALL.fragments()]
    layers = [{name: t.clone().requires_grad_() for name, t in layer.items()} for layer in layers]
    embedding, *blocks, final = layers
    every = [t for layer in layers for t in layer.values()]
    kinds = [
        {"params": [t for t in every if t.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [t for t in every if t.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(kinds, lr=recipe.learning_rate, betas=(BETA1, BETA2), eps=EPSILON)
    losses = []
    for step in range(steps):
        batch = bitwise.sample_text(SMALL, bitwise.SEQUENCES, seed=step)
        x = GPT.embed(embedding, batch[:, :-1])
        for block in blocks:
            x = GPT.block(block, x, SMALL)
        loss = F.cross_entropy(
            head(final, embedding["token"], x, SMALL).flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        if clipping == "exact":
            torch.nn.utils.clip_grad_norm_(every, recipe.clip)
        for layer in layers if clipping == "layer" else []:
            torch.nn.utils.clip_grad_norm_(layer.values(), recipe.clip / math.sqrt(len(layers)))
        optimizer.step()
        losses.append(loss.item())
    return losses, [torch.cat([t.detach().flatten() for t in layer.values()]) for layer in layers]


# Each clipping once in `make test`, with and without a staging buffer in `make test-all`.
AUTOGRAD_CASES = [
    pytest.param(
        clipping, staged, marks=[] if staged == (clipping == "exact") else pytest.mark.slow
    )
    for clipping in bitwise.CLIPPINGS
    for staged in (False, True)
]


@pytest.mark.parametrize(("clipping", "staged"), AUTOGRAD_CASES)
def test_twenty_steps_match_torch_autograd_and_adamw(clipping, staged):
    """Compare losses within 1e-5, and each layer's weights within 2 % of the distance they moved.

    Adam turns the last bits of tiny gradients into whole steps.
    """
    losses, layers = train_with_autograd(clipping, 20)
    plan = replace(from_disk(resident(SMALL, 4, clipping)), gradient_slots=2, staged=staged)
    ours, state = bitwise.run_plan(plan, 20)
    assert ours == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0] - 0.5
    for fragment, master, expected in zip(SMALL.fragments(), state[::3], layers, strict=True):
        actual = torch.cat([t.flatten() for t in views(fragment, master).values()])
        initial = torch.cat(
            [
                t.flatten()
                for t in views(fragment, units_to_float(bitwise.initial_units(fragment))).values()
            ]
        )
        assert (actual - expected).norm() <= 0.02 * (expected - initial).norm()
