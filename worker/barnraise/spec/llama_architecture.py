"""Describe Llama's architecture: RMSNorm, rotary positions, grouped queries, SwiGLU. Pure."""

from collections.abc import Sequence

from barnraise.spec.architecture import (
    BF16_BYTES,
    FP32_BYTES,
    Architecture,
    BlockStreams,
    MicroBatch,
    attention_scratch_bytes,
    gradient_chunk,
)
from barnraise.spec.model_dimensions import ModelDimensions, TensorShape, norm_tensor


class LlamaArchitecture(Architecture):
    """The architecture of Llama, SmolLM and Qwen3, as `models/llama.py` computes it."""

    name = "llama"
    title = "Llama"
    block_kernels = {"float32": (50, 130), "bfloat16": (60, 150)}
    norm_statistics = 1

    def embedding_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the table of tokens."""
        return (_table("token", model),)

    def block_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the tensors of one block."""
        d, f = model.width, model.hidden_width
        q, kv = model.query_width, model.key_value_width
        head_norms = ("query_norm.weight", "key_norm.weight") if model.qk_norm else ()
        return (
            norm_tensor("norm1.weight", d),
            TensorShape("qkv.weight", (q + 2 * kv, d), "matrix", model.normal, (q, kv, kv)),
            *(norm_tensor(name, model.head_width) for name in head_norms),
            TensorShape("out.weight", (d, q), "matrix", model.normal_of_residual),
            norm_tensor("norm2.weight", d),
            TensorShape("gate_up.weight", (2 * f, d), "matrix", model.normal, (f, f)),
            TensorShape("down.weight", (d, f), "matrix", model.normal_of_residual),
        )

    def final_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the final norm and, unless it is the table of tokens, the head."""
        head = () if model.tied_head else (_table("head", model),)
        return (norm_tensor("norm.weight", model.width), *head)

    def problems(self, model: ModelDimensions) -> dict[str, str]:
        """Check key-value heads, the size of a head, and what the others need of the width."""
        found: dict[str, str] = {}
        if model.heads % model.grouped_heads:
            fitting = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
            best = min(fitting, key=lambda n: abs(n - model.key_value_heads))
            found["key_value_heads"] = (
                f"the heads ({model.heads}) must be divisible by the key-value heads "
                f"({model.key_value_heads}); try {best}"
            )
        if model.head_width % 2:
            found["head_size" if model.head_size else "heads"] = (
                f"rotary positions turn pairs of elements: a head of {model.head_width} elements "
                "must have an even size"
            )
        return found

    def block_streams(self, model: ModelDimensions) -> BlockStreams:
        """Return those of two norms, two additions, rotation and SwiGLU.

        They are counted from what each operation reads and writes, not fitted to measurements: of
        the norms 7 each forward and 20 backward, of the additions 3.
        """
        qkv, f = self._qkv_width(model) / model.width, model.hidden_width / model.width
        return BlockStreams(
            forward=20 + 7 * qkv + 5 * f,
            backward=46 + 10 * qkv + 11 * f,
            cached=6 + 4 * qkv + 4 * f,
        )

    def saved_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the bytes that a block's forward with gradients leaves allocated.

        In elements a token: norm1, the sum, norm2 and the output d each; what attention saves; gate
        and up 2 f, hidden f; one a norm.
        """
        narrow = _narrow_bytes(batch)
        of_token = FP32_BYTES * (2 * model.width + 1)
        of_token += narrow * (model.width + 3 * model.hidden_width)
        scales = 0 if batch.dtype == "float32" else FP32_BYTES * model.width
        return _tokens(model, batch) * of_token + scales + self._attention_bytes(model, batch)

    def forward_peak_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the peak of a block's forward.

        It is at SwiGLU, with the sum, norm2, gate and up, and hidden; or in attention; or at the
        rotation, or the norm, of the queries.
        """
        d, q, qkv = model.width, model.query_width, self._qkv_width(model)
        narrow, tokens = _narrow_bytes(batch), _tokens(model, batch)
        at_swiglu = tokens * (2 * FP32_BYTES * d + 3 * narrow * model.hidden_width)
        # Without gradients norm1 stays in fp32, and the scale is not saved.
        with_norm = self._attention_bytes(model, batch) + tokens * (FP32_BYTES - narrow) * d
        scratch = attention_scratch_bytes(model, batch.threads, 1, batch.dtype)
        in_attention = with_norm + max(scratch, narrow * tokens * d)
        before = tokens * (FP32_BYTES * d + narrow * qkv)
        before += narrow * model.context * model.head_width
        at_rotation = before + narrow * tokens * qkv
        if model.qk_norm:
            at_rotation = before + tokens * (FP32_BYTES * model.heads + 2 * FP32_BYTES * q)
            at_rotation += tokens * narrow * q if batch.dtype != "float32" else 0
        return max(at_swiglu, in_attention, at_rotation)

    def backward_peak_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the peak of a block's recomputation and backward.

        It is at SwiGLU, with hidden's gradient, its product with `up`, and the gradient of gate and
        up; or where the gradient of a matrix is computed; or, with many threads, inside attention.
        """
        d, f, q = model.width, model.hidden_width, model.query_width
        narrow, tokens, qkv = _narrow_bytes(batch), _tokens(model, batch), self._qkv_width(model)
        recomputed = self.saved_bytes(model, batch) - FP32_BYTES * tokens * d
        at_swiglu = recomputed + 3 * narrow * tokens * f
        # A bfloat16 gradient is added to the sum so far, which is fp32, one chunk at a time.
        chunk = min(2 * f * d, gradient_chunk(batch.device))
        copied = FP32_BYTES * chunk if batch.dtype != "float32" and batch.device == "cpu" else 0
        at_gate_up = recomputed - narrow * tokens * (f - d) + narrow * 2 * f * d + copied
        attention = self._attention_bytes(model, batch) + FP32_BYTES * tokens * d
        scratch = attention_scratch_bytes(model, batch.threads, 2, batch.dtype)
        scratch += FP32_BYTES * batch.threads * 256  # a sum of each row of a tile
        at_out = attention + narrow * (tokens * q + d * q) + copied
        in_attention = attention + narrow * tokens * (q + qkv) + scratch
        at_qkv = tokens * (FP32_BYTES * 2 * d + narrow * (2 * d + 2 * qkv)) + narrow * qkv * d
        peak = max(at_swiglu, at_gate_up, at_out, in_attention, at_qkv + copied)
        return peak + FP32_BYTES  # a scalar of autograd

    def _attention_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the bytes that norm1 and attention save.

        In elements a token: norm1 d; rotated queries and keys, and values; mixed q; one a head for
        attention's logarithms, and one for the norm. Norms of queries and keys also save what they
        were computed from. On a GPU in fp32, keys and values are repeated for each query's head.
        """
        narrow, tokens = _narrow_bytes(batch), _tokens(model, batch)
        q, kv = model.query_width, model.key_value_width
        elements = model.width + 2 * q + 2 * kv
        statistics = model.heads + 1
        if model.qk_norm:
            elements += q + kv
            statistics += (q + kv) // model.head_width
        if batch.device != "cpu" and batch.dtype == "float32":
            elements += 2 * q
        scales = 0 if batch.dtype == "float32" else FP32_BYTES * model.width
        angles = narrow * model.context * model.head_width
        return tokens * (narrow * elements + FP32_BYTES * statistics) + scales + angles

    def norm_backward_bytes(self, model: ModelDimensions, tokens: int, threads: int) -> int:
        """Return two streams, a mean of each token, and the gradient of the scale."""
        return FP32_BYTES * (2 * tokens * model.width + tokens + model.width)

    @staticmethod
    def _qkv_width(model: ModelDimensions) -> int:
        return model.query_width + 2 * model.key_value_width


def _narrow_bytes(batch: MicroBatch) -> int:
    """Return the bytes of an element between the norms."""
    return FP32_BYTES if batch.dtype == "float32" else BF16_BYTES


def _tokens(model: ModelDimensions, batch: MicroBatch) -> int:
    return batch.sequences * model.context


def _table(name: str, model: ModelDimensions) -> TensorShape:
    return TensorShape(name, (model.vocabulary, model.width), "embedding", model.normal)
