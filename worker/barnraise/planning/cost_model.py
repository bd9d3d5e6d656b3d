"""Compute what a model costs in closed form: FLOPs, bytes and, on a `Hardware`, seconds. Pure.

Notation:
    n: sequences · context, the tokens of a micro-batch
    d: the model's width
    u: 4·n·d, the bytes of one fp32 stream [n, d]

The counts are those of `barnraise.models.gpt2`'s functions, and are tested against torch's own
counters. With bfloat16 (`dtype`) products run at that dtype's rate. Each function says what is
approximate in it.
"""

import math

from barnraise.planning.hardware import Hardware, Rates
from barnraise.spec import ModelSpec

FP32_BYTES = 4
BF16_BYTES = 2
# How the fused loss slices the logits; `swap/fused_loss.py` takes these numbers from here.
LOSS_ROWS = 256  # the fewest tokens of a slice
LOSS_WORDS = 1 << 13  # words of the table whose gradient is added at once
LOSS_CPU_LOGITS = 1 << 20  # logits of a slice on a CPU: 4 MiB
LOSS_GPU_LOGITS = 1 << 26
# Elements of a bfloat16 gradient that `swap/leaves.py` adds at once. A CPU makes an fp32 copy of
# them, and a GPU none: it is efficient with few large calls.
CPU_GRADIENT_CHUNK = 1 << 18
GPU_GRADIENT_CHUNK = 1 << 25
# Bytes a parameter of a gradient that is added: read twice, written once, in fp32.
ADDED_GRADIENT_BYTES = 12
# The backward of causal attention has this many times the FLOPs of its forward.
ATTENTION_BACKWARD = 2.5
# With deterministic algorithms a GPU's attention backward adds the gradients of the queries in a
# fixed order. Until it is measured, it is assumed to take this many times as long. Each sequence's
# heads are split so that all multiprocessors work, and each split has fp32 gradients of its own.
DETERMINISTIC_BACKWARD = 1.5
# Kernels of a block and micro-batch on a GPU, by the weights' dtype: forward; recomputation and
# backward. HEAD_KERNELS are those of the head and the embedding.
BLOCK_KERNELS = {"float32": (10, 39), "bfloat16": (17, 53)}
HEAD_KERNELS = {"float32": 25, "bfloat16": 38}
MULTIPROCESSORS = 132  # of the largest GPUs


# ---- work ----------------------------------------------------------------------------------------


def block_parameters(model: ModelSpec) -> int:
    """Return the number of parameters of one block."""
    return 12 * model.width**2 + 13 * model.width


def block_flops(model: ModelSpec, sequences: int) -> int:
    """Return the FLOPs of a block's four products forward; the backward has twice as many."""
    return 2 * sequences * model.context * 12 * model.width**2


def attention_flops(model: ModelSpec, sequences: int) -> int:
    """Return the FLOPs of causal attention forward, counted as the half that is not masked.

    The backward has 2.5 times as many.
    """
    return 2 * sequences * model.context**2 * model.width


def head_flops(model: ModelSpec, sequences: int) -> int:
    """Return the FLOPs of the logits; the backward has twice as many. The embedding has none."""
    return 2 * sequences * model.context * model.width * model.vocabulary


# ---- memory --------------------------------------------------------------------------------------
# Bytes that torch's allocator hands out, to the byte in fp32 on a CPU. With bfloat16 weights under
# autocast the stream and the norms stay fp32, and everything between them takes half. The workspace
# of a library (oneDNN, cuBLAS) is not counted.


def stream_bytes(model: ModelSpec, sequences: int) -> int:
    """Return u: one fp32 [sequences, context, width], such as a block's input or its gradient."""
    return FP32_BYTES * sequences * model.context * model.width


def saved_bytes(model: ModelSpec, sequences: int, dtype: str = "float32") -> int:
    """Return the bytes that a block's forward with gradients leaves allocated.

    These are 15 u for the backward (norm1 1, qkv 3, mixed 1, sum 1, norm2 1, up 4, gelu 4), 1 u of
    output, the norms' means and deviations, and attention's logarithms.
    """
    u = stream_bytes(model, sequences)
    statistics = FP32_BYTES * sequences * model.context * (4 + model.heads)
    if dtype == "float32":
        return 16 * u + statistics
    norm_weights = 4 * FP32_BYTES * model.width
    return 9 * u + statistics + norm_weights


def forward_peak_bytes(
    model: ModelSpec, sequences: int, dtype: str = "float32", threads: int = 1
) -> int:
    """Return the peak of a block's forward without gradients, its input not counted.

    The peak holds the sum, norm2, up and gelu.
    """
    u = stream_bytes(model, sequences)
    scratch = _attention_scratch_bytes(model, threads, tiles=1)
    if dtype == "float32":
        return max(10 * u, 5 * u + scratch)
    return max(6 * u, 7 * u // 2 + scratch)


def gradient_chunk(device: str) -> int:
    """Return the number of elements of a bfloat16 gradient that are added at once."""
    return CPU_GRADIENT_CHUNK if device == "cpu" else GPU_GRADIENT_CHUNK


def backward_peak_bytes(
    model: ModelSpec, sequences: int, dtype: str = "float32", threads: int = 1, device: str = "cpu"
) -> int:
    """Return the peak of a block's recomputation and backward.

    Not counted are its input, its output's gradient, its parameters and their gradients. The peak
    is at gelu, with the gradients on both its sides; or where the gradient of `up`'s weights is
    computed; or, with many threads, inside attention. The output is not recomputed.
    """
    d = model.width
    u = stream_bytes(model, sequences)
    saved = saved_bytes(model, sequences, dtype)
    scratch = _attention_scratch_bytes(model, threads, tiles=2)
    up_parameters = 4 * d * d + 4 * d
    if dtype == "float32":
        at_gelu = saved + 3 * u + FP32_BYTES * d
        at_up = saved - 4 * u + FP32_BYTES * (up_parameters + 1)
        in_attention = saved - 6 * u + scratch
        return max(at_gelu, at_up, in_attention)
    # A bfloat16 gradient is added to the sum so far, which is fp32, one chunk at a time.
    chunk = min(4 * d * d, gradient_chunk(device))
    copied = FP32_BYTES * chunk if device == "cpu" else 0
    at_down = saved + 3 * u // 2 + BF16_BYTES * chunk + copied
    at_up = saved - 5 * u // 2 + BF16_BYTES * up_parameters + copied
    in_attention = saved - 4 * u + scratch
    return max(at_down, at_up, in_attention)


def deterministic_bytes(model: ModelSpec, sequences: int) -> int:
    """Return what a deterministic attention backward takes on a GPU, besides the usual peak."""
    splits = -(-MULTIPROCESSORS // (sequences * model.heads))
    return splits * stream_bytes(model, sequences)


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
    d = model.width
    vocabulary = model.vocabulary
    tokens = sequences * model.context
    u = stream_bytes(model, sequences)
    rows = min(tokens, loss_rows(vocabulary, device, with_gradients))
    last_rows = min(rows, tokens - rows)
    losses = FP32_BYTES * tokens
    norm_statistics = 2 * FP32_BYTES * tokens  # mean and deviation of the norm
    if dtype == "float32":
        slices = FP32_BYTES * vocabulary * max(2 * rows, rows + 2 * last_rows)
    else:
        stream_slice = BF16_BYTES * rows * d + 2 * FP32_BYTES * d  # with the norm's fp32 weights
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
    in_norm_backward = 3 * u + norm_statistics + losses + 2 * FP32_BYTES * d * (1 + threads)
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


def embed_peak_bytes(model: ModelSpec, sequences: int) -> int:
    """Return the peak of the look-up: the rows found, and their sum with the positions."""
    return 2 * stream_bytes(model, sequences)


def _attention_scratch_bytes(model: ModelSpec, threads: int, tiles: int) -> int:
    """Return the bytes of torch's flash attention on a CPU.

    Each thread holds `tiles` tiles of scores, and in the forward (one tile) a tile of output.
    """
    length = model.context
    if length >= 768:
        rows = 256
    elif length >= 192:
        rows = 64
    else:
        rows = min(length, 32)
    output = rows * (2 + model.width // model.heads) if tiles == 1 else 0
    return FP32_BYTES * threads * (tiles * rows * min(length, 512) + output)


# ---- seconds -------------------------------------------------------------------------------------


def block_forward_seconds(
    hw: Hardware, model: ModelSpec, sequences: int, dtype: str = "float32"
) -> float:
    """Return the seconds of one block forward over one micro-batch, with gradients or without."""
    product_rate = rate_at(hw.in_dtype(dtype).forward, model.width)
    products = block_flops(model, sequences) / product_rate
    attention = attention_flops(model, sequences) / _attention_rate(hw, model)
    return products + attention + 18 * stream_bytes(model, sequences) / hw.elementwise


def block_recompute_seconds(
    hw: Hardware, model: ModelSpec, sequences: int, dtype: str = "float32"
) -> float:
    """Return the seconds of the recomputation before a block's backward.

    It is a forward without the last product, whose output the backward does not need.
    """
    product_rate = rate_at(hw.in_dtype(dtype).forward, model.width)
    last_product = block_flops(model, sequences) / 3 / product_rate
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
    streams = 45 * stream_bytes(model, sequences) / hw.elementwise
    # All gradients but those of `down` are added to a sum.
    added = ADDED_GRADIENT_BYTES * 2 / 3 * block_parameters(model) / hw.compute_stream
    return products + attention + streams + added


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
    backward_rate = rate_at(rates.backward, model.width)
    seconds += 2 * flops / backward_rate + 2 * logits / hw.elementwise
    return seconds


def embed_seconds(hw: Hardware, model: ModelSpec, sequences: int) -> float:
    """Return the seconds of one micro-batch's look-up; the backward takes about as long again."""
    return 5 * stream_bytes(model, sequences) / hw.elementwise


def launch_seconds(hw: Hardware, kernels: int) -> float:
    """Return the seconds in which a GPU's host starts so many kernels; 0 if not measured."""
    return kernels / hw.launches if hw.launches else 0.0


def adam_seconds(
    hw: Hardware, parameters: int, dtype: str = "float32", bits: int = 32, where: str = "host"
) -> float:
    """Return the seconds of AdamW over so many parameters."""
    return parameters / hw.update_rate(where, dtype, bits)


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
        by_head_width = rate_at(hw.attention_heads, model.width / model.heads)
    return by_context * by_head_width / hw.attention
