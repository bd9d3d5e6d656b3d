"""Muon agrees with torch's, and a swapped run has the bits of the resident run."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.effort import one_in
from helpers.worker.plans import bitwise, engine_of, from_disk, resident, sample_text, tiny_plan
from torch.utils._python_dispatch import TorchDispatchMode

from barnraise.errors import StateError
from barnraise.models.functions import FUNCTIONS, head
from barnraise.models.weights import Weights, views
from barnraise.planning.cost_model import MUON_KERNELS, newton_schulz_bytes, newton_schulz_flops
from barnraise.planning.tile_layout import Matrix, lay_out_tiles, list_matrices
from barnraise.spec import MUON, OPTIMIZERS, ModelSpec
from barnraise.swap import muon
from barnraise.swap.adamw import BETA1, BETA2, EPSILON, AdamWStep, sum_of_squares
from barnraise.swap.muon_moments import find_optimizer
from barnraise.swap.precision import units_to_float

GPT = FUNCTIONS["gpt2"]

RATE, DECAY = 0.01, 0.1
STEP = AdamWStep(bitwise.MODEL.fragments()[1], 1, 0.004, DECAY, matrix_rate=RATE)
# torch's iteration is in bfloat16, ours in fp32: they differ by the rounding of its products.
BFLOAT16_TOLERANCE = 0.03
SHAPES = [(48, 48), (96, 24), (24, 96)]
RECIPE = replace(bitwise.RECIPE, optimizer=MUON)


@pytest.fixture(autouse=True)
def one_thread(restored_threads):
    torch.set_num_threads(1)


# ---- torch's Muon --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_twenty_steps_of_a_matrix_match_torch(shape):
    """Compare the way that the weights went, and the momentum, which has no product in it."""
    torch.manual_seed(0)
    matrix = Matrix(0, *shape)
    theirs = torch.randn(shape).requires_grad_()
    ours, momentum = theirs.detach().clone().flatten(), torch.zeros(theirs.numel())
    begin = theirs.detach().clone()
    optimizer = torch.optim.Muon(
        [theirs], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(20):
        gradient = torch.randn(shape)
        theirs.grad = gradient.clone()
        optimizer.step()
        muon.update_matrix(STEP, matrix, ours, gradient.flatten(), momentum)
    way = theirs.detach() - begin
    assert (ours.view(shape) - theirs.detach()).norm() <= BFLOAT16_TOLERANCE * way.norm()
    expected = optimizer.state[theirs]["momentum_buffer"].flatten()
    torch.testing.assert_close(momentum, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalised_matrix_has_singular_values_near_one(shape):
    matrix = torch.randn(min(shape), max(shape))
    result, _ = muon.orthogonalise(matrix / matrix.norm(), torch.empty_like(matrix))
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3 and values.max() < 1.3


def test_iteration_in_fp32_is_that_of_fp64():
    x = torch.randn(48, 96, dtype=torch.float64)
    x /= x.norm()
    expected, _ = muon.orthogonalise(x.clone(), torch.empty_like(x))
    actual, _ = muon.orthogonalise(x.float(), torch.empty(48, 96))
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


def test_zero_gradient_leaves_only_the_decay():
    weights, momentum = torch.ones(64), torch.zeros(64)
    muon.update_matrix(STEP, Matrix(0, 8, 8), weights, torch.zeros(64), momentum)
    torch.testing.assert_close(weights, torch.full((64,), 1 - RATE * DECAY))


def test_step_that_is_not_finite_changes_nothing_on_a_device():
    weights, momentum = torch.randn(64), torch.randn(64)
    before = weights.clone(), momentum.clone()
    step = replace(STEP, found_inf=torch.ones(()))
    muon.update_matrix(step, Matrix(0, 8, 8), weights, torch.full((64,), torch.nan), momentum)
    assert torch.equal(weights, before[0]) and torch.equal(momentum, before[1])
    gradient = torch.randn(64)
    muon.update_matrix(
        replace(STEP, found_inf=torch.zeros(())), Matrix(0, 8, 8), weights, gradient, momentum
    )
    muon.update_matrix(STEP, Matrix(0, 8, 8), before[0], gradient, before[1])
    assert torch.equal(weights, before[0]) and torch.equal(momentum, before[1])


SMALL = ModelSpec(layers=3, width=32, heads=4, context=16, vocabulary=300)


def split_block(weights: Weights) -> Weights:
    """Return a block's leaves with queries, keys and values apart."""
    leaves = {name: t for name, t in weights.items() if name != "qkv.weight"}
    parts = zip("qkv", weights["qkv.weight"].chunk(3), strict=True)
    leaves |= {f"{name}.weight": part for name, part in parts}
    return {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}


def joined_block(leaves: Weights) -> Weights:
    """Return the weights that `GPT.block` expects."""
    qkv = torch.cat([leaves[f"{name}.weight"] for name in "qkv"])
    return {**leaves, "qkv.weight": qkv}


def train_with_torch(steps: int, clipping: str) -> list[float]:
    """Train by one graph a step, torch.optim.Muon and torch.optim.AdamW.

    AdamW's gradients are clipped by the norm of all gradients; with "layer" those of a block's
    norms and biases by the norm of the block's.
    """
    layers = [views(f, units_to_float(bitwise.initial_units(f))) for f in SMALL.fragments()]
    embedding, *blocks, final = layers
    embedding, final = (
        {name: t.clone().requires_grad_() for name, t in layer.items()}
        for layer in (embedding, final)
    )
    blocks = [split_block(block) for block in blocks]
    matrices = [t for block in blocks for t in block.values() if t.dim() == 2]
    vectors = [t for block in blocks for t in block.values() if t.dim() == 1] + [*final.values()]
    kinds = [
        {"params": [*embedding.values()], "weight_decay": RECIPE.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers = [
        torch.optim.AdamW(kinds, lr=RECIPE.learning_rate, betas=(BETA1, BETA2), eps=EPSILON),
        torch.optim.Muon(
            matrices,
            lr=RECIPE.peak_matrix_rate,
            weight_decay=RECIPE.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
    ]
    others = [*embedding.values(), *vectors]
    ends = [*embedding.values(), *final.values()]
    losses = []
    for step in range(steps):
        batch = bitwise.sample_text(SMALL, bitwise.SEQUENCES, seed=step)
        x = GPT.embed(embedding, batch[:, :-1])
        for block in blocks:
            x = GPT.block(joined_block(block), x, SMALL)
        loss = F.cross_entropy(
            head(final, embedding["token"], x, SMALL).flatten(0, 1), batch[:, 1:].flatten()
        )
        for t in (*matrices, *others):
            t.grad = None
        loss.backward()
        whole = norm_of(matrices + others)
        if clipping == "layer":
            limit = RECIPE.clip / math.sqrt(len(layers))
            for block in blocks:
                clip([t for t in block.values() if t.dim() == 1], norm_of(block.values()), limit)
        clip(ends if clipping == "layer" else others, whole, RECIPE.clip)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the norm of the tensors' gradients together."""
    return float(torch.stack([t.grad.norm() for t in tensors]).norm())


def clip(tensors: list[torch.Tensor], norm: float, limit: float) -> None:
    """Divide gradients by as much as a norm is above its limit."""
    for t in tensors:
        t.grad /= max(1.0, norm / limit)


@pytest.mark.parametrize(
    ("staged", "clipping"), [(False, "exact"), (True, "exact"), (True, "layer")]
)
def test_twenty_steps_of_a_gpt_match_torch(staged, clipping):
    """Compare losses within 1 %; torch's products of the iteration are in bfloat16."""
    losses = train_with_torch(20, clipping)
    plan = replace(
        from_disk(resident(SMALL, 4, clipping)), gradient_slots=2, staged=staged, optimizer=MUON
    )
    ours, _ = bitwise.run_plan(plan, 20)
    assert ours[:2] == pytest.approx(losses[:2], rel=1e-5)
    assert ours == pytest.approx(losses, rel=1e-2)
    assert losses[-1] < losses[0] - 0.5


def test_layerwise_clipping_has_the_whole_norm_for_the_ends():
    """Only norms and biases of blocks get another norm than with exact clipping."""
    exact, layer = (
        bitwise.run_plan(resident(SMALL, clipping=clipping, optimizer=MUON), 1)[1]
        for clipping in ("exact", "layer")
    )
    for i, fragment in enumerate(SMALL.fragments()):
        (weights, m, v), others = exact[3 * i : 3 * i + 3], layer[3 * i : 3 * i + 3]
        pairs = list(zip((weights, m, v), others, strict=True))
        if fragment.name.startswith("block"):
            matrices = list_matrices(fragment)
            pairs = [
                (one[k.begin : k.end], o[k.begin : k.end]) for k in matrices for one, o in pairs[:2]
            ]
        assert all(torch.equal(one, other) for one, other in pairs), fragment.name
    assert not all(map(torch.equal, exact, layer))


# ---- swapped runs --------------------------------------------------------------------------------

SWAPPED = [
    bitwise.Case(m, tier, clipping, (37 * k + 11) % 128, (29 * k + 3) % 128, MUON)
    for k, (m, tier, clipping) in enumerate(
        (m, tier, clipping)
        for tier in bitwise.TIERS
        for clipping in bitwise.CLIPPINGS
        for m in (1, 2, 4)
    )
]


@pytest.mark.parametrize("case", one_in(3, SWAPPED), ids=str)
def test_swapped_run_has_the_bits_of_the_resident_run(case):
    assert bitwise.matches_reference(case, steps=4)


WIDE = ModelSpec(layers=2, width=192, heads=4, context=8, vocabulary=256)  # 2 tiles a block
FORMS = [
    (tier, clipping, dtype, threads)
    for tier in bitwise.TIERS
    for clipping in ("exact", "layer")
    for dtype in ("float32", "bfloat16")
    for threads in (1, 2)
]


@pytest.mark.parametrize(("tier", "clipping", "dtype", "threads"), one_in(7, FORMS))
def test_blocks_of_several_tiles_swap_with_the_same_bits(tier, clipping, dtype, threads):
    torch.set_num_threads(threads)
    changes = {"optimizer": MUON, "dtype": dtype}
    plan = replace(bitwise.Case(2, tier, clipping, 1, 1).plan(WIDE), **changes)
    assert not plan.on_disk or plan.tile_count(1) == 2
    expected = bitwise.run_plan(resident(WIDE, 2, clipping, **changes), 3)
    assert bitwise.equal_bits(bitwise.run_plan(plan, 3), expected)


def test_split_weights_differ_only_by_the_rounding_of_products():
    wide, narrow = (
        bitwise.run_plan(resident(SMALL, optimizer=MUON, dtype=dtype), 6)[0]
        for dtype in ("float32", "bfloat16")
    )
    assert wide[0] == pytest.approx(narrow[0], rel=5e-3) and wide[0] != narrow[0]
    assert wide[-1] == pytest.approx(narrow[-1], rel=2e-2)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["resident", "staged", "exact", "restart", "staged disk"])
def test_reopened_or_loaded_state_continues_with_the_same_bits(kind, tmp_path):
    recipe = replace(RECIPE, clip=1.0)
    plan = tiny_plan(kind, optimizer=MUON)
    engine, straight = (engine_of(plan, tmp_path / name, recipe) for name in ("a", "b"))
    for each in (engine, straight):
        for step in range(3):
            each.step([sample_text(seed=step)])
    if plan.on_disk:
        engine.commit(closing=True)
        engine.close()
        engine = engine_of(plan, tmp_path / "a", recipe)
    else:
        # A checkpoint begins a round: both do.
        saved = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        engine.close()
        engine = engine_of(plan, recipe=recipe)
        engine.load_state_dict(saved)
        straight.flush()
        straight.reset_round()
    for each in (engine, straight):
        for step in range(3, 6):
            each.step([sample_text(seed=step)])
    pairs = zip(bitwise.read_state(engine), bitwise.read_state(straight), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    engine.close()
    straight.close()


@pytest.mark.parametrize(("ours", "saved"), [("adamw", "muon"), ("muon", "adamw")])
def test_state_of_the_other_optimizer_is_refused_by_name(ours, saved):
    engine, other = (engine_of(tiny_plan(optimizer=name), recipe=RECIPE) for name in (ours, saved))
    before = bitwise.read_state(engine)
    with pytest.raises(StateError, match=f"optimizer {saved}.*trains with {ours}"):
        engine.load_state_dict(other.state_dict())
    assert all(map(torch.equal, before, bitwise.read_state(engine)))
    engine.close()
    other.close()


def test_optimizer_of_a_state_is_found_by_its_second_moments():
    block = SMALL.fragments()[1]
    for optimizer in OPTIMIZERS:
        count = lay_out_tiles(block, block.size, optimizer)[0].second_moments
        assert find_optimizer(block, torch.empty(count)) == optimizer
    assert find_optimizer(block, torch.empty(1)) == find_optimizer(block, None) == ""


def test_matrices_have_no_second_moment_in_any_state(tmp_path):
    """A state on disk takes 8 bytes a parameter instead of 12, besides what the exchange needs."""
    model = ModelSpec(layers=4, width=256, heads=4, context=8, vocabulary=256)
    plans = [from_disk(resident(model), restart=True, optimizer=o) for o in ("adamw", MUON)]
    blocks = [sum(plan.total_bytes(kind, 1) for kind in ("weights", "moments")) for plan in plans]
    assert 0.666 <= blocks[1] / blocks[0] < 0.675
    engine = engine_of(tiny_plan(optimizer=MUON), recipe=RECIPE)
    state = engine.state_dict()
    block = engine.fragments[1]
    vectors = lay_out_tiles(block, block.size, MUON)[0].second_moments
    assert state["m.1"].numel() == block.size and state["v.1"].numel() == vectors
    assert state["v.0"].numel() == engine.fragments[0].size
    engine.close()


def test_step_moves_a_third_less_between_disk_and_memory(tmp_path):
    """The embedding is not counted: AdamW trains all of it."""
    model = ModelSpec(layers=4, width=128, heads=4, context=8, vocabulary=256)
    moved = []
    for optimizer in OPTIMIZERS:
        plan = from_disk(resident(model, clipping="layer"), restart=True, optimizer=optimizer)
        engine = engine_of(plan, tmp_path / optimizer)
        before = engine.store.written_today
        engine.step([sample_text(8, model=model)])
        engine.executor.drain()
        ends = plan.total_bytes("moments", 0) + plan.total_bytes("moments", plan.last_fragment)
        moved.append(engine.store.written_today - before - ends)
        engine.close()
    assert moved[1] / moved[0] < 0.69


# ---- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flops_and_bytes_are_those_of_the_iteration(shape):
    from torch.utils.flop_counter import FlopCounterMode

    matrix = torch.randn(min(shape), max(shape))
    with FlopCounterMode(display=False) as counter:
        muon.orthogonalise(matrix, torch.empty_like(matrix))
    assert counter.get_total_flops() == newton_schulz_flops(*shape)
    allocated = 2 * matrix.nbytes + 2 * 4 * min(shape) ** 2
    assert newton_schulz_bytes(min(shape), max(shape)) == allocated


class KernelCounter(TorchDispatchMode):
    """Count the operations that compute or copy: on a GPU each launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or "empty" in func.name() or "split" in func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_of_a_matrix_are_those_that_a_plan_prices(shape):
    step = replace(STEP, found_inf=torch.zeros(()))
    flats = torch.randn(3, shape[0] * shape[1])
    with KernelCounter() as kernels:
        muon.update_matrix(step, Matrix(0, *shape), *flats)
    assert kernels.count == pytest.approx(MUON_KERNELS, abs=3)


def test_bits_of_a_matrix_do_not_depend_on_where_it_lies():
    torch.manual_seed(1)
    weights, gradient, momentum = torch.randn(3, 96 * 64)
    results = []
    for shift in (0, 16, 48):
        flats = [torch.zeros(96 * 64 + 64) for _ in range(3)]
        pieces = [flat[shift : shift + 96 * 64] for flat in flats]
        for piece, value in zip(pieces, (weights, gradient, momentum), strict=True):
            piece.copy_(value)
        muon.update_matrix(STEP, Matrix(0, 96, 64), *pieces)
        results.append(pieces[0].clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert sum_of_squares(results[0]).isfinite()
