"""What planning, storage and the site have to know of an architecture. Pure.

An architecture is this description and, in `models/`, the functions that compute it. Every number
about it that another file needs comes from one of the two. Bytes are those that torch's allocator
hands out, to the byte in fp32 on a CPU. With bfloat16 weights under autocast the stream and the
norms stay fp32, and everything between them takes half. The workspace of a library (oneDNN, cuBLAS)
is not counted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from barnraise.spec.model_dimensions import ModelDimensions, TensorShape

FP32_BYTES = 4
BF16_BYTES = 2
# Elements of a bfloat16 gradient that `swap/leaves.py` adds at once. A CPU makes an fp32 copy of
# them, and a GPU none: it is efficient with few large calls.
CPU_GRADIENT_CHUNK = 1 << 18
GPU_GRADIENT_CHUNK = 1 << 25


@dataclass(frozen=True)
class MicroBatch:
    """What the memory of a micro-batch depends on, apart from the model.

    Attributes:
        sequences: sequences of the model's context.
        dtype: of the weights, "float32" or "bfloat16".
        threads: that compute, on a CPU.
        device: "cpu" or "cuda".
    """

    sequences: int
    dtype: str = "float32"
    threads: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class BlockStreams:
    """The fp32 streams [sequences, context, width] that a block's elementwise operations move.

    Attributes:
        forward: of the forward.
        backward: of the backward, without recomputation.
        cached: of the work on a part of a prompt, while text is written, without the scores of
            attention.
    """

    forward: float
    backward: float
    cached: float


class Architecture(ABC):
    """The description of one architecture.

    Attributes:
        name: as specs name it.
        title: as people do.
        block_kernels: kernels of a block and micro-batch on a GPU, by the weights' dtype: forward;
            recomputation and backward.
        norm_statistics: numbers a token that a norm computes in fp32 and its backward needs.
    """

    name: str
    title: str
    block_kernels: dict[str, tuple[int, int]]
    norm_statistics: int

    # ---- tensors ---------------------------------------------------------------------------------

    @abstractmethod
    def embedding_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the tensors of the embedding."""

    @abstractmethod
    def block_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the tensors of one block. The last product of a block is by "down.weight"."""

    @abstractmethod
    def final_tensors(self, model: ModelDimensions) -> Sequence[TensorShape]:
        """List the tensors of the final norm, and of an untied head."""

    @abstractmethod
    def problems(self, model: ModelDimensions) -> dict[str, str]:
        """Return what this architecture cannot compute: field → a sentence of what to change."""

    # ---- work ------------------------------------------------------------------------------------

    def block_parameters(self, model: ModelDimensions) -> int:
        """Return the number of parameters of one block."""
        return sum(tensor.size for tensor in self.block_tensors(model))

    def product_parameters(self, model: ModelDimensions) -> int:
        """Return the number of elements of one block's matrices."""
        return sum(tensor.size for tensor in self.block_tensors(model) if tensor.kind == "matrix")

    def last_product_parameters(self, model: ModelDimensions) -> int:
        """Return the number of elements of the matrix of a block's last product."""
        tensors = self.block_tensors(model)
        return next(tensor.size for tensor in tensors if tensor.name == "down.weight")

    @abstractmethod
    def block_streams(self, model: ModelDimensions) -> BlockStreams:
        """Return what the elementwise operations of a block move."""

    # ---- memory ----------------------------------------------------------------------------------

    @abstractmethod
    def saved_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the bytes that a block's forward with gradients leaves allocated."""

    @abstractmethod
    def forward_peak_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the peak of a block's forward without gradients, its input not counted."""

    @abstractmethod
    def backward_peak_bytes(self, model: ModelDimensions, batch: MicroBatch) -> int:
        """Return the peak of a block's recomputation and backward.

        Not counted are its input, its output's gradient, its parameters and their gradients. The
        output is not recomputed.
        """

    def embed_peak_bytes(self, model: ModelDimensions, sequences: int) -> int:
        """Return the peak of the look-up: the rows found in each table."""
        return len(self.embedding_tensors(model)) * stream_bytes(model, sequences)

    @abstractmethod
    def norm_backward_bytes(self, model: ModelDimensions, tokens: int, threads: int) -> int:
        """Return the bytes that the backward of the final norm allocates."""

    def norm_weight_elements(self, model: ModelDimensions) -> int:
        """Return the number of elements of the final norm's weights."""
        tensors = self.final_tensors(model)
        return sum(tensor.size for tensor in tensors if tensor.kind != "embedding")


def stream_bytes(model: ModelDimensions, sequences: int) -> int:
    """Return u: one fp32 [sequences, context, width], such as a block's input or its gradient."""
    return FP32_BYTES * sequences * model.context * model.width


def gradient_chunk(device: str) -> int:
    """Return the number of elements of a bfloat16 gradient that are added at once."""
    return CPU_GRADIENT_CHUNK if device == "cpu" else GPU_GRADIENT_CHUNK


def attention_scratch_bytes(
    model: ModelDimensions, threads: int, tiles: int, dtype: str = "float32"
) -> int:
    """Return the bytes of torch's flash attention on a CPU.

    Each thread holds `tiles` tiles of scores, and in the forward (one tile) a tile of output. The
    scores are fp32; with bfloat16 there are copies in that type.
    """
    length = model.context
    if length >= 768:
        rows = 256
    elif length >= 192:
        rows = 64
    else:
        rows = min(length, 32)
    output = rows * (2 + model.head_width) if tiles == 1 else 0
    scores = tiles * rows * min(length, 512)
    copies = BF16_BYTES * (2 * tiles - 1) * rows * min(length, 512) if dtype == "bfloat16" else 0
    return threads * (FP32_BYTES * (scores + output) + copies)
