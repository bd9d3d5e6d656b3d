"""What a model costs, in closed form: FLOPs, bytes and, on a given `Hardware`, seconds. No torch, nothing measured.

Notation: n = sequences · context tokens in a micro-batch, d the width, u = 4·n·d one fp32 stream [n, d] in bytes.
Counts are of `barnraise.models.gpt2`'s functions and tested against torch's own counters. With bfloat16 (`dtype`) products
run at that dtype's rate; see each function for what is approximate there.
"""

import math

from barnraise.planning.hardware import Hardware, Rates
from barnraise.spec import ModelSpec

FP32 = 4
LOSS_ROWS, LOSS_WORDS, LOSS_CPU, LOSS_GPU = (
    256,
    1 << 13,
    1 << 20,
    1 << 26,
)  # swap/loss.py's slices; a test compares
SPILLED = 1 << 18  # swap/arena.py's; a test compares
ADDED_BYTES = 12  # a gradient that was made and then added: read twice, written once, fp32; all but `down`'s are


# ---- work ----------------------------------------------------------------------------------------------------


def block_parameters(model: ModelSpec) -> int:
    return 12 * model.width**2 + 13 * model.width


def block_flops(model: ModelSpec, sequences: int, context: int | None = None) -> int:
    """Of the four products of a block's forward; the backward has twice as many."""
    return 2 * sequences * (context or model.context) * 12 * model.width**2


def attention_flops(model: ModelSpec, sequences: int, context: int | None = None) -> int:
    """Of a causal attention's forward, counted as the half that is not masked; the backward has 2.5 times as many."""
    return 2 * sequences * (context or model.context) ** 2 * model.width


def head_flops(model: ModelSpec, sequences: int, context: int | None = None) -> int:
    """Of the logits; the backward has twice as many. The embedding is a look-up and has none."""
    return 2 * sequences * (context or model.context) * model.width * model.vocabulary


def parameter_bytes(model: ModelSpec) -> int:
    """Of all fp32 weights, without padding."""
    return FP32 * model.parameters


# ---- memory --------------------------------------------------------------------------------------------------
# Bytes torch's allocator gives out, to the byte in fp32 on a CPU. With bfloat16 weights under autocast the stream and
# the norms stay fp32, all between is half; a library's own workspace (oneDNN, cuBLAS) is not counted there.


def stream_bytes(model: ModelSpec, sequences: int, context: int | None = None) -> int:
    """u: one fp32 [sequences, context, width], such as a block's input or its gradient."""
    return FP32 * sequences * (context or model.context) * model.width


def saved_bytes(
    model: ModelSpec, sequences: int, context: int | None = None, dtype: str = "float32"
) -> int:
    """What a block's forward with grad leaves allocated: 15 u for backward (norm1 1, qkv 3, mixed 1, sum 1, norm2 1, up
    4, gelu 4), 1 u of output, the norms' means and deviations, attention's logarithms."""
    d, u = model.width, stream_bytes(model, sequences, context)
    small = FP32 * sequences * (context or model.context) * (4 + model.heads)
    return (
        16 * u + small if dtype == "float32" else 9 * u + small + 4 * FP32 * d
    )  # the norms' weights in fp32


def forward_peak_bytes(
    model: ModelSpec,
    sequences: int,
    context: int | None = None,
    dtype: str = "float32",
    threads: int = 1,
) -> int:
    """A block's forward without grad, its input not counted: the sum, norm2, up and gelu. `threads`: of the CPU."""
    u, scratch = (
        stream_bytes(model, sequences, context),
        _attention_scratch(model, context, threads, 1),
    )
    return max(10 * u, 5 * u + scratch) if dtype == "float32" else max(6 * u, 7 * u // 2 + scratch)


def backward_peak_bytes(
    model: ModelSpec,
    sequences: int,
    context: int | None = None,
    dtype: str = "float32",
    threads: int = 1,
) -> int:
    """Recompute and backward of a block; not counted are its input, its output's gradient, parameters and their .grad.
    The peak is at gelu, with the gradients on both its sides; or where `up` has its weights' gradient made; or, with
    many threads, within attention. The output is not there: nobody computes it again."""
    d, u, saved = (
        model.width,
        stream_bytes(model, sequences, context),
        saved_bytes(model, sequences, context, dtype),
    )
    scratch = _attention_scratch(model, context, threads, 2)
    if dtype == "float32":
        return max(
            saved + 3 * u + FP32 * d,
            saved - 4 * u + FP32 * (4 * d * d + 4 * d + 1),
            saved - 6 * u + scratch,
        )
    added = min(4 * d * d, SPILLED)  # to the gradient so far, which is fp32
    down = saved + 3 * u // 2 + (FP32 + 2) * added
    return max(
        down, saved - 5 * u // 2 + 2 * (4 * d * d + 4 * d) + FP32 * added, saved - 4 * u + scratch
    )


def head_peak_bytes(
    model: ModelSpec,
    sequences: int,
    context: int | None = None,
    dtype: str = "float32",
    threads: int = 1,
    device: str = "cpu",
    wanted: bool = True,
) -> int:
    """The loss of `swap.loss`, with gradients (`wanted`) or without; its input and the table's gradient not counted.
    Slabs of logits decide: each slice's, its softmax and the softmax before it. With few words, the norm's backward."""
    d, words, tokens = model.width, model.vocabulary, sequences * (context or model.context)
    u, rows = stream_bytes(model, sequences, context), min(tokens, loss_rows(words, device))
    last, chances, norms = (
        min(rows, tokens - rows),
        FP32 * tokens,
        2 * FP32 * tokens,
    )  # of the norm: mean, deviation
    if dtype == "float32":
        slabs = FP32 * words * max(2 * rows, rows + 2 * last)
    else:
        part, logits = (
            2 * rows * d + 2 * FP32 * d,
            2 * rows * words,
        )  # and the norm's weights in fp32
        added = (
            6 * min(words, LOSS_WORDS) * d if wanted else 0
        )  # to the table's gradient: as made, and in fp32
        softmax = (5 if device == "cpu" else 3) * logits  # a CPU's needs the logits in fp32
        slabs = part + max(softmax + (logits if last else 0), logits + added)
    if not wanted:
        return u + slabs + chances
    return max(
        2 * u + norms + chances + slabs, 3 * u + norms + chances + 2 * FP32 * d * (1 + threads)
    )


def loss_rows(vocabulary: int, device: str = "cpu") -> int:
    """Tokens in one slice of the head."""
    return max(LOSS_ROWS, (LOSS_CPU if device == "cpu" else LOSS_GPU) // vocabulary)


def embed_peak_bytes(model: ModelSpec, sequences: int, context: int | None = None) -> int:
    """The look-up: the rows found and their sum with the positions."""
    return 2 * stream_bytes(model, sequences, context)


def _attention_scratch(model: ModelSpec, context: int | None, threads: int, tiles: int) -> int:
    """torch's flash attention on a CPU keeps `tiles` tiles of scores a thread, and in forward one of output."""
    length = context or model.context
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    output = rows * (2 + model.width // model.heads) if tiles == 1 else 0
    return FP32 * threads * (tiles * rows * min(length, 512) + output)


# ---- seconds -------------------------------------------------------------------------------------------------


def block_forward_seconds(
    hw: Hardware,
    model: ModelSpec,
    sequences: int,
    context: int | None = None,
    dtype: str = "float32",
) -> float:
    """One block over one micro-batch, with grad or without."""
    products = block_flops(model, sequences, context) / at(hw.in_dtype(dtype).forward, model.width)
    mixing = attention_flops(model, sequences, context) / _attention_rate(hw, model, context)
    return products + mixing + 18 * stream_bytes(model, sequences, context) / hw.elementwise


def block_again_seconds(
    hw: Hardware,
    model: ModelSpec,
    sequences: int,
    context: int | None = None,
    dtype: str = "float32",
) -> float:
    """The recompute before a block's backward: a forward without its last product, which nobody needs."""
    spared = (
        block_flops(model, sequences, context) / 3 / at(hw.in_dtype(dtype).forward, model.width)
    )
    return block_forward_seconds(hw, model, sequences, context, dtype) - spared


def block_backward_seconds(
    hw: Hardware,
    model: ModelSpec,
    sequences: int,
    context: int | None = None,
    dtype: str = "float32",
) -> float:
    """The gradients of one block over one micro-batch, without the recompute before."""
    products = (
        2 * block_flops(model, sequences, context) / at(hw.in_dtype(dtype).backward, model.width)
    )
    slower = (hw.attention_backward or hw.attention) / hw.attention
    mixing = (
        2.5
        * attention_flops(model, sequences, context)
        / (_attention_rate(hw, model, context) * slower)
    )
    streams = 45 * stream_bytes(model, sequences, context) / hw.elementwise
    return products + mixing + streams + ADDED_BYTES * 2 / 3 * block_parameters(model) / hw.stream


def head_seconds(
    hw: Hardware,
    model: ModelSpec,
    sequences: int,
    context: int | None = None,
    dtype: str = "float32",
    wanted: bool = True,
) -> float:
    """The loss of one micro-batch, with gradients (`wanted`) or without."""
    flops, rates = head_flops(model, sequences, context), hw.in_dtype(dtype)
    logits = FP32 * sequences * (context or model.context) * model.vocabulary
    usual = hw.logits and dtype == (hw.dtype if hw.device == "cuda" else "float32")
    seconds = flops / (at(hw.logits, model.vocabulary) if usual else at(rates.forward, model.width))
    seconds += 3 * logits / hw.elementwise
    if wanted:
        seconds += 2 * flops / at(rates.backward, model.width) + 2 * logits / hw.elementwise
    return seconds


def embed_seconds(
    hw: Hardware, model: ModelSpec, sequences: int, context: int | None = None
) -> float:
    """The look-up of one micro-batch forward; backward adds about as much again."""
    return 5 * stream_bytes(model, sequences, context) / hw.elementwise


def adam_seconds(
    hw: Hardware, parameters: int, dtype: str = "float32", bits: int = 32, where: str = "host"
) -> float:
    return parameters / hw.update_rate(where, dtype, bits)


def at(rates: Rates, size: float) -> float:
    """The rate at `size`: between the measured sizes along the logarithm of size, beyond them the nearest one's."""
    (low, slow), *rest = rates
    if size <= low:
        return slow
    for high, fast in rest:
        if size <= high:
            return slow + (fast - slow) * math.log(size / low) / math.log(high / low)
        low, slow = high, fast
    return slow


def _attention_rate(hw: Hardware, model: ModelSpec, context: int | None) -> float:
    """Forward FLOP/s: at this context, times what this head width does to it."""
    along = (
        at(hw.attention_contexts, context or model.context)
        if hw.attention_contexts
        else hw.attention
    )
    across = (
        at(hw.attention_heads, model.width / model.heads) if hw.attention_heads else hw.attention
    )
    return along * across / hw.attention
