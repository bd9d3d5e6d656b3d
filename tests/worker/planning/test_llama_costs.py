"""The closed forms of Llama's architecture agree with torch's counter and allocator."""

import pytest
import torch
from helpers.cuda.torch_allocations import allocated_after, peak_allocated
from torch.utils.flop_counter import FlopCounterMode

from barnraise.models import llama
from barnraise.models.functions import head
from barnraise.models.weights import views
from barnraise.planning import cost_model
from barnraise.spec import ModelSpec, preset
from barnraise.spec.architectures import architecture_of
from barnraise.swap.forward_backward import BlockEnd
from barnraise.swap.fused_loss import Head, head_loss, head_step
from barnraise.swap.leaves import Leaves

# (width, heads, key-value heads, head size, feed-forward width, context, sequences, norms of q, k)
BLOCK_SHAPES = [
    (128, 4, 2, 0, 384, 128, 8, False),
    (128, 2, 1, 0, 344, 1024, 2, False),
    (256, 8, 8, 0, 704, 256, 3, False),
    (512, 8, 4, 0, 1408, 512, 2, True),
    (576, 9, 3, 0, 1536, 1024, 1, False),
    (1024, 16, 8, 128, 3072, 512, 1, True),
    (1024, 16, 4, 0, 2816, 64, 1, False),
    (128, 4, 4, 0, 64, 1024, 1, False),
    (128, 4, 1, 0, 384, 40, 1, False),
    (256, 8, 2, 64, 128, 1024, 1, True),
]
HEAD_SHAPES = [  # width, vocabulary, sequences, context
    (128, 2048, 8, 128),
    (256, 8192, 1, 400),
    (1600, 300, 1, 128),
    (64, 128_256, 2, 512),
    (64, 151_936, 1, 300),
]


def model_of_shape(*shape) -> ModelSpec:
    width, heads, key_value_heads, head_size, hidden, context, qk_norm = shape
    return ModelSpec(
        architecture="llama",
        layers=2,
        width=width,
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=head_size,
        hidden=hidden,
        context=context,
        vocabulary=300,
        qk_norm=qk_norm,
    )


def is_just_above(predicted: int, measured: int) -> bool:
    return measured <= predicted <= 1.03 * measured


@pytest.mark.parametrize("name", ["llama-nano", "smollm2-360m", "qwen3-0.6b", "llama3.1-70b"])
def test_forward_flops_equal_those_that_torch_counts(name):
    model = preset(name)
    weights = [
        views(fragment, torch.empty(fragment.size, device="meta")) for fragment in model.fragments()
    ]
    x = torch.empty(2, model.context, model.width, device="meta")
    with FlopCounterMode(display=False) as counter:
        llama.block(weights[1], x, model)
    # The counter ignores the causal mask, which halves the products of attention.
    full_attention = 2 * cost_model.attention_flops(model, 2)
    assert counter.get_total_flops() == cost_model.block_flops(model, 2) + full_attention
    fragment, table = model.head_table
    with FlopCounterMode(display=False) as counter:
        head(weights[-1], weights[fragment][table], x, model)
    assert counter.get_total_flops() == cost_model.head_flops(model, 2)


@pytest.mark.parametrize("name", ["llama-nano", "qwen3-8b"])
def test_parameters_are_those_of_the_tensors(name):
    model, fragments = preset(name), preset(name).fragments()
    in_block = sum(slot.size for slot in fragments[1].slots)
    assert architecture_of(model).block_parameters(model) == in_block
    for slot in fragments[1].slots:
        assert not slot.parts or sum(slot.parts) == slot.shape[0]


def test_backward_of_a_block_has_twice_the_flops_of_its_forward():
    model = model_of_shape(64, 4, 2, 0, 176, 96, False)
    leaves = Leaves(model.fragments()[1], torch.randn(model.fragments()[1].size).mul_(0.02))
    y = llama.block(leaves.weights, torch.randn(2, 96, 64, requires_grad=True), model)
    with FlopCounterMode(display=False) as counter:
        y.backward(torch.ones_like(y))
    assert counter.get_total_flops() == 2 * cost_model.block_flops(model, 2)


@pytest.mark.integration
@pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
def test_block_memory_is_predicted_within_three_percent(shape):
    """The prediction is never below what torch allocates."""
    *of_model, sequences, qk_norm = shape
    model, threads = model_of_shape(*of_model, qk_norm), torch.get_num_threads()
    fragment = model.fragments()[1]
    leaves = Leaves(fragment, torch.randn(fragment.size).mul_(0.02))
    leaves.accumulate_into(torch.zeros(fragment.size))
    x, dy = torch.randn(2, sequences, model.context, model.width)

    def build_graph(leaf: torch.Tensor, with_output: bool) -> torch.Tensor:
        return BlockEnd.apply(*llama.block_start(leaves.weights, leaf, model), leaves, with_output)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return llama.block(leaves.weights, x, model)

    def recompute_and_backward() -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        build_graph(leaf, with_output=False).backward(dy)
        return leaf.grad

    saved = allocated_after(lambda: build_graph(x.detach().requires_grad_(), with_output=True))
    assert is_just_above(cost_model.saved_bytes(model, sequences), saved)
    forward_peak = cost_model.forward_peak_bytes(model, sequences, threads=threads)
    assert is_just_above(forward_peak, peak_allocated(forward))
    backward_peak = cost_model.backward_peak_bytes(model, sequences, threads=threads)
    assert is_just_above(backward_peak, peak_allocated(recompute_and_backward))


@pytest.mark.integration
@pytest.mark.parametrize(("width", "vocabulary", "sequences", "context"), HEAD_SHAPES)
def test_head_memory_is_predicted_within_three_percent(width, vocabulary, sequences, context):
    """Vocabularies of Llama 3 and Qwen3 are among them."""
    model = ModelSpec(2, width, 4, context, vocabulary, architecture="llama", tied_head=False)
    scale = torch.ones(width).requires_grad_()
    scale.grad = torch.zeros(width)
    table = torch.randn(vocabulary, width)
    output, gradient = Head(model, {"norm.weight": scale}, table), torch.zeros_like(table)
    x = torch.randn(sequences, context, width)
    targets = torch.randint(vocabulary, (sequences, context))
    step = peak_allocated(lambda: head_step(output, x, targets, 1.0, gradient))
    assert is_just_above(cost_model.head_peak_bytes(model, sequences), step)
    loss = peak_allocated(lambda: head_loss(output, x, targets))
    assert is_just_above(cost_model.head_peak_bytes(model, sequences, with_gradients=False), loss)
