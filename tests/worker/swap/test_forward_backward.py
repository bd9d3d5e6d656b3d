"""Tests of forward and backward of groups of blocks, against one graph over all of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.worker.plans import groups, resident, sample_text

from barnraise.ledger.anchor import initial_weights
from barnraise.models.functions import FUNCTIONS, head
from barnraise.models.weights import views
from barnraise.planning.program import LaneName
from barnraise.spec import ModelSpec
from barnraise.swap.activations import Activations, HostActivations
from barnraise.swap.forward_backward import ForwardBackward
from barnraise.swap.fused_loss import Head, head_step
from barnraise.swap.lanes import WorkerLane
from barnraise.swap.leaves import Leaves
from barnraise.swap.precision import units_to_float

GPT = FUNCTIONS["gpt2"]

MODEL = ModelSpec(layers=6, width=16, heads=2, context=8, vocabulary=256)
RECOMPUTATIONS = [
    dict(),
    dict(retained_blocks=6),
    dict(retained_blocks=2),
    dict(kept_inputs="group"),
    dict(kept_inputs="group", retained_blocks=1),
    dict(kept_inputs="group", retained_blocks=3),
]


class CountedActivations(Activations):
    """Activations that record the largest number stored."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def store(self, i, m, x) -> None:
        super().store(i, m, x)
        self.most = max(self.most, self.count)


def run(plan, activations, text: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the losses and the gradients of each fragment."""
    flats = [units_to_float(initial_weights(fragment, 3)) for fragment in plan.fragments]
    leaves = [Leaves(f, flat) for f, flat in zip(plan.fragments, flats, strict=True)]
    gradients = [torch.zeros_like(flat) for flat in flats]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.accumulate_into(gradient)
    batches = list(text.split(plan.sequences))
    step = ForwardBackward(
        plan, batches, [len(batch) / len(text) for batch in batches], activations
    )
    table = torch.zeros(MODEL.vocabulary, MODEL.width)
    step.embed(leaves[0])
    for group in plan.forward_groups:
        step.forward(group, [leaves[i] for i in group])
    step.head(leaves[-1], leaves[0], table)
    for group in plan.backward_groups:
        step.backward(group, [leaves[i] for i in group])
    step.embed_backward(views(plan.fragments[0], gradients[0]), table)
    return step.losses, gradients


def planned(forward: int, backward: int, **recomputation):
    return resident(
        MODEL,
        3,
        sequences=2,
        forward_groups=groups(6, forward),
        backward_groups=groups(6, backward)[::-1],
        **recomputation,
    )


def text() -> torch.Tensor:
    return sample_text(6, seed=1, model=MODEL)


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS, ids=str)
@pytest.mark.parametrize(
    ("forward", "backward"), [(31, 31), (0, 0), (0b10100, 0b00110), (0b00100, 31)]
)
def test_any_grouping_and_recomputation_gives_the_same_bits(forward, backward, recomputation):
    expected, counted = run(planned(31, 31), Activations(), text()), CountedActivations()
    actual = run(planned(forward, backward, **recomputation), counted, text())
    for ours, theirs in zip((*actual[0], *actual[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(ours, theirs)
    assert counted.count == 0, "nothing is stored when the step has ended"


def test_gradients_match_one_graph_over_the_whole_model():
    fragments = MODEL.fragments()
    flats = [units_to_float(initial_weights(f, 3)).requires_grad_() for f in fragments]
    layers = [views(f, flat) for f, flat in zip(fragments, flats, strict=True)]
    batch = text()
    x = GPT.embed(layers[0], batch[:, :-1])
    for layer in layers[1:-1]:
        x = GPT.block(layer, x, MODEL)
    loss = F.cross_entropy(
        head(layers[-1], layers[0]["token"], x, MODEL).flatten(0, 1), batch[:, 1:].flatten()
    )
    loss.backward()
    losses, gradients = run(planned(0, 5, kept_inputs="group"), Activations(), batch)
    assert sum(losses).item() == pytest.approx(loss.item(), rel=1e-6)
    for ours, flat in zip(gradients, flats, strict=True):
        torch.testing.assert_close(ours, flat.grad, rtol=1e-4, atol=1e-7)


def test_storing_inputs_of_groups_stores_fewer_of_them():
    by_block, by_group = CountedActivations(), CountedActivations()
    run(planned(0b00100, 0b00100), by_block, text())
    run(planned(0b00100, 0b00100, kept_inputs="group"), by_group, text())
    assert by_block.most == 3 * 6 and by_group.most == 3 * 2


def test_host_activations_return_unchanged():
    lanes = {name: WorkerLane(name, inline=name is LaneName.COMPUTE) for name in LaneName}
    for forward, backward, changes in (
        (31, 31, {}),
        (31, 31, dict(near_inputs=2)),
        (31, 31, dict(near_inputs=1, retained_blocks=2)),
        (31, 0b10010, {}),
        (0b00100, 0b10010, dict(kept_inputs="group")),
        (0b00100, 0b10010, dict(kept_inputs="group", near_inputs=1)),
    ):
        plan = planned(forward, backward, boundaries="host", **changes)
        count = 3 * len(plan.inputs_in_ram)
        pool = [torch.empty(2 * MODEL.context * MODEL.width) for _ in range(count)]
        activations = HostActivations(plan, lanes, pool)
        actual = run(plan, activations, text())
        expected = run(replace(plan, boundaries="device"), Activations(), text())
        assert all(torch.equal(a, b) for a, b in zip(actual[1], expected[1], strict=True))
        assert activations.count == 0, "every buffer is free again"
    for lane in lanes.values():
        lane.close()


def test_table_padded_with_rows_that_are_no_words_gives_the_same_loss():
    """The products of a GPU's tensor cores want aligned rows: 300 words become 320 rows."""
    fragment = ModelSpec(layers=1, width=32, heads=1, context=64, vocabulary=300).fragments()[0]
    leaves = Leaves(fragment, torch.randn(fragment.size).bfloat16())
    final = {name: torch.ones(32).requires_grad_() for name in ("norm.weight", "norm.bias")}
    x, targets = torch.randn(4, 64, 32), torch.randint(300, (4, 64))
    losses, gradients = [], []
    for token in (leaves.weights["token"], leaves.padded_rows("token", 64)):
        token_gradient = torch.zeros(300, 32)
        head_of = Head(MODEL, final, token)
        with torch.autocast("cpu", torch.bfloat16):
            loss, dx = head_step(head_of, x, targets, 0.5, token_gradient)
        losses.append(loss)
        gradients.append((dx, token_gradient))
    assert len(leaves.padded_rows("token", 64)) == 320
    assert len(leaves.padded_rows("token", 1 << 20)) == 300, "the buffer has not so many rows"
    assert torch.equal(*losses)
    for ours, padded in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, ours, rtol=2e-2, atol=1e-4)
