"""The cost model agrees with torch: FLOPs with its counter, bytes with its allocator's record."""

import dataclasses

import pytest
import torch
from example_hardware import cpu_machine
from helpers.cuda.torch_allocations import allocated_after, peak_allocated
from helpers.effort import one_in
from torch.utils.flop_counter import FlopCounterMode

from barnraise.models.functions import functions_of, head
from barnraise.models.weights import views
from barnraise.planning import cost_model
from barnraise.planning.hardware import MatmulRates, UpdateRate
from barnraise.spec import ModelSpec, preset
from barnraise.spec.architecture import MicroBatch
from barnraise.spec.architectures import architecture_of
from barnraise.swap import fused_loss
from barnraise.swap.forward_backward import BlockEnd
from barnraise.swap.leaves import Leaves

BLOCK_SHAPES = [  # width, heads, context, sequences
    (128, 4, 128, 8),
    (128, 2, 1024, 2),
    (256, 8, 256, 3),
    (512, 8, 512, 4),
    (768, 12, 1024, 1),
    (768, 12, 1024, 2),
    (1024, 16, 512, 1),
    (1600, 25, 128, 1),
    (128, 4, 40, 1),
]
# The same; then key-value heads, feed-forward width, head size, norms of queries and keys.
LLAMA_SHAPES = [
    (128, 4, 128, 8, 2, 384, 0, False),
    (128, 2, 1024, 2, 1, 344, 0, False),
    (256, 8, 256, 3, 8, 704, 0, False),
    (512, 8, 512, 2, 4, 1408, 0, True),
    (576, 9, 1024, 1, 3, 1536, 0, False),
    (1024, 16, 512, 1, 8, 3072, 128, True),
    (1024, 16, 64, 1, 4, 2816, 0, False),
    (128, 4, 1024, 1, 4, 64, 0, False),
    (128, 4, 40, 1, 1, 384, 0, False),
    (256, 8, 1024, 1, 2, 128, 64, True),
]
HEAD_SHAPES = [  # architecture, width, vocabulary, sequences, context
    ("gpt2", 128, 2048, 1, 128),
    ("gpt2", 128, 2048, 8, 128),
    ("gpt2", 256, 2048, 3, 256),
    ("gpt2", 256, 8192, 1, 400),
    ("gpt2", 1600, 300, 1, 128),
    ("gpt2", 768, 50257, 1, 512),
    ("llama", 128, 2048, 8, 128),
    ("llama", 256, 8192, 1, 400),
    ("llama", 1600, 300, 1, 128),
    ("llama", 64, 128_256, 2, 512),
    ("llama", 64, 151_936, 1, 300),
]
LLAMAS = ["llama-nano", "smollm2-360m", "qwen3-0.6b", "llama3.1-70b"]
BOTH = pytest.mark.parametrize("architecture", ["gpt2", "llama"])


def two_layer_model(width: int, heads: int, context: int, vocabulary: int = 300, **others):
    return ModelSpec(2, width, heads, context, vocabulary, **others)


def block_cases() -> list[tuple[ModelSpec, int]]:
    """List models and sequences whose blocks are measured."""
    cases = [(two_layer_model(*shape), sequences) for *shape, sequences in BLOCK_SHAPES]
    names = ("key_value_heads", "hidden", "head_size", "qk_norm")
    for width, heads, context, sequences, *others in LLAMA_SHAPES:
        fields = dict(zip(names, others, strict=True), architecture="llama")
        cases.append((two_layer_model(width, heads, context, **fields), sequences))
    return cases


def random_leaves(model: ModelSpec, index: int) -> Leaves:
    """Create a fragment's weights as the engine does."""
    fragment = model.fragments()[index]
    leaves = Leaves(fragment, torch.randn(fragment.size).mul_(0.02))
    leaves.accumulate_into(torch.zeros(fragment.size))
    return leaves


def is_just_above(predicted: int, measured: int) -> bool:
    return measured <= predicted <= 1.03 * measured


# ---- FLOPs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gpt-nano", "gpt-mini", "gpt2-124m", "gpt2-1.5b", "gpt3-175b", *LLAMAS]
)
@pytest.mark.parametrize("sequences", [1, 3])
def test_forward_flops_equal_those_that_torch_counts(name, sequences):
    model = preset(name)
    functions = functions_of(model)
    weights = [
        views(fragment, torch.empty(fragment.size, device="meta")) for fragment in model.fragments()
    ]
    x = torch.empty(sequences, model.context, model.width, device="meta")
    with FlopCounterMode(display=False) as counter:
        functions.block(weights[1], x, model)
    # The counter ignores the causal mask, which halves the products of attention.
    full_attention = 2 * cost_model.attention_flops(model, sequences)
    assert counter.get_total_flops() == cost_model.block_flops(model, sequences) + full_attention
    fragment, table = model.head_table
    with FlopCounterMode(display=False) as counter:
        head(weights[-1], weights[fragment][table], x, model)
    assert counter.get_total_flops() == cost_model.head_flops(model, sequences)
    with FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(sequences, model.context, dtype=torch.int64, device="meta")
        functions.embed(weights[0], tokens)
    assert counter.get_total_flops() == 0


@BOTH
def test_backward_of_a_block_has_twice_the_flops_of_its_forward(architecture):
    model = two_layer_model(64, 4, 96, architecture=architecture)
    x = torch.randn(2, 96, 64, requires_grad=True)
    y = functions_of(model).block(random_leaves(model, 1).weights, x, model)
    with FlopCounterMode(display=False) as counter:
        y.backward(torch.ones_like(y))
    # The counter counts no attention on a CPU, and `block_flops` includes none.
    assert counter.get_total_flops() == 2 * cost_model.block_flops(model, 2)


@pytest.mark.parametrize("name", ["gpt-nano", "gpt2-124m", "gpt3-13b", "llama-nano", "qwen3-8b"])
def test_parameters_are_those_of_the_tensors(name):
    model = preset(name)
    slots = [fragment.slots for fragment in model.fragments()]
    assert model.parameters == sum(slot.size for fragment in slots for slot in fragment)
    assert architecture_of(model).block_parameters(model) == sum(slot.size for slot in slots[1])
    assert all(sum(slot.parts) == slot.shape[0] for slot in slots[1] if slot.parts)


# ---- memory ----------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize(("model", "sequences"), one_in(3, block_cases()), ids=str)
def test_block_memory_is_predicted_within_three_percent(model, sequences):
    """The prediction is never below what torch allocates."""
    functions, threads = functions_of(model), torch.get_num_threads()
    leaves = random_leaves(model, 1)
    x, dy = torch.randn(2, sequences, model.context, model.width)

    def build_graph(leaf: torch.Tensor, with_output: bool) -> torch.Tensor:
        start = functions.block_start(leaves.weights, leaf, model)
        return BlockEnd.apply(*start, leaves, with_output)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return functions.block(leaves.weights, x, model)

    def recompute_and_backward() -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        build_graph(leaf, with_output=False).backward(dy)
        return leaf.grad

    saved = allocated_after(lambda: build_graph(x.detach().requires_grad_(), with_output=True))
    architecture, batch = architecture_of(model), MicroBatch(sequences, threads=threads)
    assert is_just_above(architecture.saved_bytes(model, batch), saved)
    assert is_just_above(architecture.forward_peak_bytes(model, batch), peak_allocated(forward))
    backward = architecture.backward_peak_bytes(model, batch)
    assert is_just_above(backward, peak_allocated(recompute_and_backward))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("architecture", "width", "vocabulary", "sequences", "context"), one_in(2, HEAD_SHAPES)
)
def test_head_memory_is_predicted_within_three_percent(
    architecture, width, vocabulary, sequences, context
):
    """Vocabularies of Llama 3 and Qwen3 are among all shapes, and one of them among the usual."""
    model = two_layer_model(width, 4, context, vocabulary, architecture=architecture)
    threads, table = torch.get_num_threads(), torch.randn(vocabulary, width)
    head_of = fused_loss.Head(model, random_leaves(model, -1).weights, table)
    gradient = torch.zeros_like(table)
    x = torch.randn(sequences, context, width)
    targets = torch.randint(vocabulary, (sequences, context))
    step = peak_allocated(lambda: fused_loss.head_step(head_of, x, targets, 1.0, gradient))
    assert is_just_above(cost_model.head_peak_bytes(model, sequences, threads=threads), step)
    loss = peak_allocated(lambda: fused_loss.head_loss(head_of, x, targets))
    assert is_just_above(cost_model.head_peak_bytes(model, sequences, with_gradients=False), loss)


@BOTH
def test_embedding_memory_is_predicted_within_three_percent(architecture):
    model = two_layer_model(128, 4, 256, architecture=architecture)
    weights, tokens = random_leaves(model, 0).weights, torch.zeros(3, 256, dtype=torch.int64)
    with torch.no_grad():
        assert is_just_above(
            architecture_of(model).embed_peak_bytes(model, 3),
            peak_allocated(lambda: functions_of(model).embed(weights, tokens)),
        )


def test_peak_memory_grows_with_the_number_of_threads():
    model = preset("gpt2-124m")
    architecture = architecture_of(model)
    for peak in (architecture.forward_peak_bytes, architecture.backward_peak_bytes):
        assert peak(model, MicroBatch(1, threads=2)) < peak(model, MicroBatch(1, threads=128))


def test_bfloat16_takes_less_memory_than_float32():
    model = preset("gpt2-355m")
    architecture = architecture_of(model)
    for predicted in (
        architecture.saved_bytes,
        architecture.forward_peak_bytes,
        architecture.backward_peak_bytes,
    ):
        assert predicted(model, MicroBatch(2, "bfloat16")) < predicted(model, MicroBatch(2))
    # Not of the head: torch widens the logits before their softmax, on a GPU as on a CPU.
    narrow = cost_model.head_peak_bytes(model, 2, dtype="bfloat16", device="cuda")
    assert narrow > cost_model.head_peak_bytes(model, 2, device="cuda")


# ---- seconds ---------------------------------------------------------------------------------

PLAIN = cpu_machine(disk=1 << 38, matmul=((128, 1e11), (1024, 2e11)), attention=1e11, adam=1e9)
PARTS = (
    cost_model.block_forward_seconds,
    cost_model.block_backward_seconds,
    cost_model.head_seconds,
    cost_model.embed_seconds,
)


def test_rate_is_interpolated_by_logarithm_and_constant_outside():
    rates = ((100, 1.0), (400, 3.0))
    interpolated = [cost_model.rate_at(rates, size) for size in (10, 100, 200, 400, 4000)]
    assert interpolated == pytest.approx([1, 1, 2, 3, 3])


@pytest.mark.parametrize("part", PARTS)
def test_seconds_grow_with_work_and_shrink_with_speed(part):
    small, large = preset("gpt2-124m"), preset("gpt2-355m")
    longer = dataclasses.replace(small, context=2048)
    assert 0 < part(PLAIN, small, 1) < part(PLAIN, small, 2) < part(PLAIN, longer, 2)
    assert part(PLAIN, small, 1) < part(PLAIN, large, 1)
    rates = ("attention", "elementwise", "stream")
    faster = {name: 2 * getattr(PLAIN, name) for name in rates}
    twice = dataclasses.replace(
        PLAIN, matmul=tuple((d, 2 * rate) for d, rate in PLAIN.matmul), **faster
    )
    assert part(twice, small, 1) == pytest.approx(part(PLAIN, small, 1) / 2)


def test_seconds_of_a_measured_dtype_use_its_own_rate():
    fast = MatmulRates("bfloat16", ((512, 1e13),), ((512, 1e13),))
    machine = dataclasses.replace(
        PLAIN, products=(MatmulRates("float32", PLAIN.matmul, PLAIN.matmul), fast)
    )
    model = preset("gpt2-124m")
    for part in (
        cost_model.block_forward_seconds,
        cost_model.block_backward_seconds,
        cost_model.head_seconds,
    ):
        assert part(machine, model, 1) == part(PLAIN, model, 1)
        assert part(machine, model, 1, dtype="bfloat16") < part(machine, model, 1)


def test_attention_seconds_use_the_rate_of_context_and_head_width():
    machine = dataclasses.replace(
        PLAIN,
        attention_contexts=((256, 5e10), (1024, 1e11)),
        attention_heads=((32, 8e10), (64, 1e11)),
    )
    wide, narrow = two_layer_model(512, 8, 1024), two_layer_model(512, 16, 1024)
    part = cost_model.block_forward_seconds
    assert part(machine, wide, 1) == part(PLAIN, wide, 1) < part(machine, narrow, 1)
    short = dataclasses.replace(wide, context=256)
    added = part(machine, short, 1) - part(PLAIN, short, 1)
    assert added == pytest.approx(cost_model.attention_flops(short, 1) / 1e11)


def test_update_rate_is_that_of_its_format_and_place():
    forms = (UpdateRate("host", "bfloat16", 8, 2e8), UpdateRate("device", "bfloat16", 8, 2e10))
    machine = dataclasses.replace(PLAIN, updates=forms)
    assert machine.update_rate("host", "bfloat16", 8) == 2e8
    assert machine.update_rate("device", "bfloat16", 8) == 2e10
    assert machine.update_rate("host", "float32", 32) == PLAIN.adam
