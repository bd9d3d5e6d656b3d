"""Compute what a model costs in closed form: FLOPs, bytes and, on a `Hardware`, seconds. Pure.

Notation:
    n: sequences · context, the tokens of a micro-batch
    d: the model's width
    u: 4·n·d, the bytes of one fp32 stream [n, d]

The counts are those of the functions in `barnraise.models`, and are tested against torch's own
counters. What differs between architectures is theirs to say (`barnraise/spec/`). With
bfloat16 (`dtype`) products run at that dtype's rate. Each function says what is approximate in it.
"""

import math
from collections.abc import Sequence

from barnraise.planning.hardware import Hardware, Rates
from barnraise.spec import ModelSpec
from barnraise.spec.architecture import (
    BF16_BYTES,
    FP32_BYTES,
    GPU_GRADIENT_CHUNK,
    stream_bytes,
)
from barnraise.spec.architectures import architecture_of

# How the fused loss slices the logits; `swap/fused_loss.py` takes these numbers from here.
LOSS_ROWS = 256  # the fewest tokens of a slice
LOSS_WORDS = 1 << 13  # words of the table whose gradient is added at once
LOSS_CPU_LOGITS = 1 << 20  # logits of a slice on a CPU: 4 MiB
LOSS_GPU_LOGITS = 1 << 26
# Bytes a parameter of a gradient that is added: read twice, written once, in fp32.
ADDED_GRADIENT_BYTES = 12
# The backward of causal attention has this many times the FLOPs of its forward.
ATTENTION_BACKWARD = 2.5
# With deterministic algorithms a GPU's attention backward adds the gradients of the queries in a
# fixed order. Until it is measured, it is assumed to take this many times as long. Each sequence's
# heads are split so that all multiprocessors work, and each split has fp32 gradients of its own.
DETERMINISTIC_BACKWARD = 1.5
NEWTON_SCHULZ_STEPS = 5
# Bytes an element that Muon reads and writes around the products: 24 for the momentum, 8 for the
# norm, 16 for the weights, and in each step the matrix twice and its result once.
MUON_BYTES = 24 + 8 + 16 + NEWTON_SCHULZ_STEPS * 12
# Kernels of the head and the embedding on a GPU, by the weights' dtype.
HEAD_KERNELS = {"float32": 25, "bfloat16": 38}
# What Python takes of the thread that launches, in bare launches (`Hardware.launches`), measured on
# a CPU with tensors of 32 elements (`benchmarks/swap/python_time.py`): a block's kernel with its
# part of autograd, autocast and views; an operation of a program, whose buffers are chosen and
# which is passed to its lane; and a step, before the first of its operations.
KERNEL_LAUNCHES = 3
OPERATION_LAUNCHES = 35
STEP_LAUNCHES = 500
# Kernels of a tile's update on a GPU, by the weights' dtype and the moments' bits, and of its norm.
UPDATE_KERNELS = {
    ("float32", 32): 1,
    ("bfloat16", 32): 7,
    ("float32", 8): 36,
    ("bfloat16", 8): 42,
}
NORM_KERNELS = 2
MUON_KERNELS = 34  # of a matrix's update on a GPU: 15 products, and what is around them
MANY_THREADS = 8
MULTIPROCESSORS = 132  # of the largest GPUs


# ---- work ----------------------------------------------------------------------------------------


def block_flops(model: ModelSpec, sequences: int) -> int:
    """Return the FLOPs of a block's products forward; the backward has twice as many."""
    return 2 * sequences * model.context * architecture_of(model).product_parameters(model)


def attention_flops(model: ModelSpec, sequences: int) -> int:
    """Return the FLOPs of causal attention forward, counted as the half that is not masked.

    The backward has 2.5 times as many.
    """
    return 2 * sequences * model.context**2 * model.query_width


def head_flops(model: ModelSpec, sequences: int) -> int:
    """Return the FLOPs of the logits; the backward has twice as many. The embedding has none."""
    return 2 * sequences * model.context * model.width * model.vocabulary


def fragment_flops(model: ModelSpec, fragment: int) -> int:
    """Return the FLOPs of a fragment for one sequence, forward and backward, without recomputation.

    The embedding has none.
    """
    if fragment == 0:
        return 0
    if fragment > model.layers:
        return 3 * head_flops(model, 1)
    attention = round((1 + ATTENTION_BACKWARD) * attention_flops(model, 1))
    return 3 * block_flops(model, 1) + attention


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the FLOPs in which Muon orthogonalises a matrix: of m × n, m ≤ n, 5·(4m²n + 2m³)."""
    m, n = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3)


# ---- memory --------------------------------------------------------------------------------------
# Bytes that torch's allocator hands out; see `spec/architecture.py`.


def deterministic_bytes(model: ModelSpec, sequences: int) -> int:
    """Return what a deterministic attention backward takes on a GPU, besides the usual peak."""
    splits = -(-MULTIPROCESSORS // (sequences * model.heads))
    return splits * FP32_BYTES * sequences * model.context * model.query_width


def head_peak_bytes(
    model: ModelSpec,
    sequences: int,
    dtype: str = "float32",
    threads: int = 1,
    device: str = "cpu",
    with_gradients: bool = True,
) -> int:
    """Return the peak of the fused loss; its input and the table's gradient are not counted.

    The slices of logits decide: one slice, its softmax and the softmax of the slice before. With
    few words the backward of the norm decides.
    """
    architecture = architecture_of(model)
    d = model.width
    vocabulary = model.vocabulary
    tokens = sequences * model.context
    u = stream_bytes(model, sequences)
    rows = min(tokens, loss_rows(vocabulary, device, with_gradients))
    last_rows = min(rows, tokens - rows)
    losses = FP32_BYTES * tokens
    norm_statistics = FP32_BYTES * architecture.norm_statistics * tokens
    norm_weights = FP32_BYTES * architecture.norm_weight_elements(model)
    if dtype == "float32":
        slices = FP32_BYTES * vocabulary * max(2 * rows, rows + 2 * last_rows)
    else:
        stream_slice = BF16_BYTES * rows * d + norm_weights  # with the norm's fp32 weights
        logits = BF16_BYTES * rows * vocabulary
        # What is added to the table's gradient: as computed and, on a CPU, in fp32.
        added_bytes = FP32_BYTES + BF16_BYTES if device == "cpu" else BF16_BYTES
        words = min(vocabulary, loss_words(d, device))
        added = added_bytes * words * d if with_gradients else 0
        softmax = 5 * logits  # with the logits in fp32
        slices = stream_slice + max(softmax + (logits if last_rows else 0), logits + added)
    if not with_gradients:
        return u + slices + losses
    while_slicing = 2 * u + norm_statistics + losses + slices
    in_norm_backward = 2 * u + norm_statistics + losses
    in_norm_backward += architecture.norm_backward_bytes(model, tokens, threads)
    return max(while_slicing, in_norm_backward)


def loss_rows(vocabulary: int, device: str = "cpu", with_gradients: bool = True) -> int:
    """Return the number of tokens in one slice of the head.

    A GPU that only validates takes the smallest slices: speed matters less than its memory.
    """
    if device != "cpu" and not with_gradients:
        return LOSS_ROWS
    logits = LOSS_CPU_LOGITS if device == "cpu" else LOSS_GPU_LOGITS
    return max(LOSS_ROWS, logits // vocabulary)


def loss_words(width: int, device: str = "cpu") -> int:
    """Return the number of words whose rows of the table's gradient are computed at once."""
    return LOSS_WORDS if device == "cpu" else max(LOSS_WORDS, GPU_GRADIENT_CHUNK // width)


def newton_schulz_bytes(m: int, n: int) -> int:
    """Return the bytes of a matrix [m, n], its successor, its rows' products and a polynomial."""
    return FP32_BYTES * (2 * m * n + 2 * m * m)


# ---- seconds -------------------------------------------------------------------------------------


def block_forward_seconds(
    hw: Hardware, model: ModelSpec, sequences: int, dtype: str = "float32"
) -> float:
    """Return the seconds of one block forward over one micro-batch, with gradients or without."""
    product_rate = rate_at(hw.in_dtype(dtype).forward, model.width)
    products = block_flops(model, sequences) / product_rate
    attention = attention_flops(model, sequences) / _attention_rate(hw, model)
    streams = architecture_of(model).block_streams(model).forward * stream_bytes(model, sequences)
    return products + attention + streams / hw.elementwise


def block_recompute_seconds(
    hw: Hardware, model: ModelSpec, sequences: int, dtype: str = "float32"
) -> float:
    """Return the seconds of the recomputation before a block's backward.

    It is a forward without the last product, whose output the backward does not need.
    """
    product_rate = rate_at(hw.in_dtype(dtype).forward, model.width)
    parameters = architecture_of(model).last_product_parameters(model)
    last_product = 2 * sequences * model.context * parameters / product_rate
    return block_forward_seconds(hw, model, sequences, dtype) - last_product


def block_backward_seconds(
    hw: Hardware,
    model: ModelSpec,
    sequences: int,
    dtype: str = "float32",
    deterministic: bool = False,
) -> float:
    """Return the seconds of one block's gradients over one micro-batch, without recomputation."""
    product_rate = rate_at(hw.in_dtype(dtype).backward, model.width)
    products = 2 * block_flops(model, sequences) / product_rate
    backward_rate = (hw.attention_backward or hw.attention) / hw.attention
    attention_rate = _attention_rate(hw, model) * backward_rate
    if deterministic:
        attention_rate /= DETERMINISTIC_BACKWARD
    attention = ATTENTION_BACKWARD * attention_flops(model, sequences) / attention_rate
    architecture = architecture_of(model)
    streams = architecture.block_streams(model).backward * stream_bytes(model, sequences)
    # All gradients but those of `down` are added to a sum.
    added_parameters = architecture.block_parameters(model)
    added_parameters -= architecture.last_product_parameters(model)
    added = ADDED_GRADIENT_BYTES * added_parameters / hw.compute_stream
    return products + attention + streams / hw.elementwise + added


def head_seconds(hw: Hardware, model: ModelSpec, sequences: int, dtype: str = "float32") -> float:
    """Return the seconds of the loss of one micro-batch."""
    flops = head_flops(model, sequences)
    rates = hw.in_dtype(dtype)
    logits = FP32_BYTES * sequences * model.context * model.vocabulary
    measured_dtype = hw.dtype if hw.device == "cuda" else "float32"
    if hw.logits and dtype == measured_dtype:
        seconds = flops / rate_at(hw.logits, model.vocabulary)
    else:
        seconds = flops / rate_at(rates.forward, model.width)
    seconds += 2 * flops / rate_at(rates.backward, model.width)
    # The loss reads and writes the logits three times forward, and twice backward.
    return seconds + 5 * logits / hw.elementwise


def embed_seconds(hw: Hardware, model: ModelSpec, sequences: int) -> float:
    """Return the seconds of one micro-batch's look-up; the backward takes about as long again."""
    return 5 * stream_bytes(model, sequences) / hw.elementwise


def launch_seconds(hw: Hardware, block_kernels: int, bare_kernels: int) -> float:
    """Return the seconds in which a GPU's host starts an operation; 0 if not measured."""
    launches = OPERATION_LAUNCHES + KERNEL_LAUNCHES * block_kernels + bare_kernels
    return launches / hw.launches if hw.launches else 0.0


def optimizer_threads(threads: int) -> int:
    """Return how many of the CPU's threads update while a GPU computes.

    One thread launches all kernels; with many there is also a core for the one that waits for
    copies.
    """
    return max(1, threads - (2 if threads >= MANY_THREADS else 1))


def muon_seconds(hw: Hardware, shapes: Sequence[tuple[int, int]]) -> float:
    """Return the seconds of Muon's updates of (rows, columns), in fp32, where blocks compute."""
    rates = hw.in_dtype("float32").forward
    seconds = 0.0
    for rows, columns in shapes:
        seconds += newton_schulz_flops(rows, columns) / rate_at(rates, min(rows, columns))
        # In buffers that come and go, as between a block's products, and not in one large stream.
        seconds += MUON_BYTES * rows * columns / hw.elementwise
    return seconds


def rate_at(rates: Rates, size: float) -> float:
    """Return the rate at a size.

    Between measured sizes it is interpolated along the logarithm of the size; outside of them the
    nearest measured rate holds.
    """
    (low, low_rate), *others = rates
    if size <= low:
        return low_rate
    for high, high_rate in others:
        if size <= high:
            position = math.log(size / low) / math.log(high / low)
            return low_rate + (high_rate - low_rate) * position
        low, low_rate = high, high_rate
    return low_rate


def _attention_rate(hw: Hardware, model: ModelSpec) -> float:
    """Return attention's forward FLOP/s: the context's rate, scaled by the effect of head width."""
    by_context = hw.attention
    if hw.attention_contexts:
        by_context = rate_at(hw.attention_contexts, model.context)
    by_head_width = hw.attention
    if hw.attention_heads:
        by_head_width = rate_at(hw.attention_heads, model.head_width)
    return by_context * by_head_width / hw.attention
