"""Describe GPT-2's architecture: pre-LayerNorm, learned positions, GELU, tied head. Pure."""

from collections.abc import Sequence
from dataclasses import fields

from barnraise.spec.architecture import (
    BF16_BYTES,
    FP32_BYTES,
    Architecture,
    BlockStreams,
    MicroBatch,
    attention_scratch_bytes,
    gradient_chunk,
    stream_bytes,
)
from barnraise.spec.model_dimensions import (
    LATER_FIELDS,
    ModelDimensions,
    TensorShape,
    bias_tensor,
    norm_tensor,
)


class GPT2Architecture(Architecture):
    """GPT-2's architecture (Radford et al. 2019), as `models/gpt2.py` computes it."""

    name = "gpt2"
    title = "GPT-2"
    block_kernels = {"float32": (10, 39), "bfloat16": (17, 53)}
    norm_statistics = 2

    def embedding_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the tables of tokens and positions."""
        shape = (model.vocabulary, model.width)
        positions = (model.context, model.width)
        return (
            TensorShape("token", shape, "embedding", model.normal),
            TensorShape("position", positions, "embedding", model.normal // 2),
        )

    def block_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the tensors of one block."""
        d = model.width
        return (
            norm_tensor("norm1.weight", d),
            bias_tensor("norm1.bias", d),
            TensorShape("qkv.weight", (3 * d, d), "matrix", model.normal, (d, d, d)),
            bias_tensor("qkv.bias", 3 * d),
            TensorShape("out.weight", (d, d), "matrix", model.normal_of_residual),
            bias_tensor("out.bias", d),
            norm_tensor("norm2.weight", d),
            bias_tensor("norm2.bias", d),
            TensorShape("up.weight", (4 * d, d), "matrix", model.normal),
            bias_tensor("up.bias", 4 * d),
            TensorShape("down.weight", (d, 4 * d), "matrix", model.normal_of_residual),
            bias_tensor("down.bias", d),
        )

    def final_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the tensors of the final norm; the head is the table of tokens."""
        return norm_tensor("norm.weight", model.width), bias_tensor("norm.bias", model.width)

    def problems(self, model: ModelDimensions) -> dict[str, str]:
        """Refuse every number that this architecture has no use for."""
        fixed = {field.name: field.default for field in fields(model)}
        return {
            name: "GPT-2 has no such setting: leave it empty, or choose a preset of another family"
            for name in LATER_FIELDS
            if getattr(model, name) != fixed[name]
        }

    def block_streams(self, model: ModelDimensions) -> BlockStreams:
        """Return those of two norms, two additions and a GELU of four times the width."""
        return BlockStreams(forward=18, backward=45, cached=24)

    def saved_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the bytes that a block's forward with gradients leaves allocated.

        These are 15 u for the backward (norm1 1, qkv 3, mixed 1, sum 1, norm2 1, up 4, gelu 4), 1 u
        of output, the norms' means and deviations, and attention's logarithms.
        """
        u = stream_bytes(model, batch.sequences)
        statistics = FP32_BYTES * batch.sequences * model.context * (4 + model.heads)
        if batch.dtype == "float32":
            return 16 * u + statistics
        norm_weights = 4 * FP32_BYTES * model.width
        return 9 * u + statistics + norm_weights

    def forward_peak_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the peak of a block's forward: the sum, norm2, up and gelu; or attention."""
        u = stream_bytes(model, batch.sequences)
        scratch = attention_scratch_bytes(model, batch.threads, tiles=1)
        if batch.dtype == "float32":
            return max(10 * u, 5 * u + scratch)
        return max(6 * u, 7 * u // 2 + scratch)

    def backward_peak_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the peak of a block's recomputation and backward.

        It is at gelu, with the gradients on both its sides; or where the gradient of `up`'s weights
        is computed; or, with many threads, inside attention.
        """
        d = model.width
        u = stream_bytes(model, batch.sequences)
        saved = self.saved_bytes(model, batch)
        scratch = attention_scratch_bytes(model, batch.threads, tiles=2)
        up_parameters = 4 * d * d + 4 * d
        if batch.dtype == "float32":
            at_gelu = saved + 3 * u + FP32_BYTES * d
            at_up = saved - 4 * u + FP32_BYTES * (up_parameters + 1)
            in_attention = saved - 6 * u + scratch
            return max(at_gelu, at_up, in_attention)
        # A bfloat16 gradient is added to the sum so far, which is fp32, one chunk at a time.
        chunk = min(4 * d * d, gradient_chunk(batch.device))
        copied = FP32_BYTES * chunk if batch.device == "cpu" else 0
        at_down = saved + 3 * u // 2 + BF16_BYTES * chunk + copied
        at_up = saved - 5 * u // 2 + BF16_BYTES * up_parameters + copied
        in_attention = saved - 4 * u + scratch
        return max(at_down, at_up, in_attention)

    def norm_backward_bytes(self, model: ModelDimensions, tokens: int, threads: int) -> int:
        """Return a stream, and the gradients of scale and shift that each thread sums."""
        return FP32_BYTES * (tokens * model.width + 2 * model.width * (1 + threads))
