"""Read token shards and draw batches from them.

Deterministic: the same (seed, peer, step) gives the same batch on every machine.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from barnraise.errors import TextError
from barnraise.protocol.coordinator_messages import Shard, TextManifest
from barnraise.spec import token_bytes

LocateBlob = Callable[[str], Path]  # returns a blob's file by its digest


class TokenDataset:
    """A run's tokens, memory-mapped.

    Raises TextError, naming the blob, for a shard that is not what the manifest says: its length,
    its digest, or a token outside the vocabulary.
    """

    def __init__(self, manifest: TextManifest, locate_blob: LocateBlob) -> None:
        self.manifest = manifest
        self._train = _ShardStream(manifest.train, manifest.vocabulary, locate_blob)
        self._held_out = _ShardStream(manifest.held_out, manifest.vocabulary, locate_blob)

    def sample_batch(
        self, seed: int, peer: str, step: int, sequences: int, context: int
    ) -> torch.Tensor:
        """Draw a training batch as a pure function of the arguments.

        Each row starts at a position drawn from BLAKE3 of (seed, peer, step).

        Returns:
            int64 [sequences, context + 1].
        """
        positions = self._train.start_positions(context)
        random_bytes = blake3(f"barnraise/batch/v1/{seed}/{peer}/{step}".encode()).digest(
            length=8 * sequences
        )
        begins = np.frombuffer(random_bytes, "<u8") % np.uint64(positions)
        return self._train.read_windows(begins.tolist(), context)

    def validation_batches(
        self, sequences: int, context: int, batch_sequences: int = 8
    ) -> list[torch.Tensor]:
        """Return the fixed validation set in batches of `batch_sequences`.

        It holds up to `sequences` windows, spread evenly over the held-out text without overlap.
        """
        positions = self._held_out.start_positions(context)
        count = max(1, min(sequences, self._held_out.token_count // (context + 1)))
        begins = [i * (positions - 1) // max(1, count - 1) for i in range(count)]
        return [
            self._held_out.read_windows(begins[i : i + batch_sequences], context)
            for i in range(0, count, batch_sequences)
        ]


class _ShardStream:
    """Shards read end to end as one stream."""

    def __init__(self, shards: Sequence[Shard], vocabulary: int, locate_blob: LocateBlob) -> None:
        self._parts = [
            _open_shard(shard, vocabulary, Path(locate_blob(shard.digest))) for shard in shards
        ]
        self._ends = np.cumsum([len(part) for part in self._parts])
        self.token_count = int(self._ends[-1])

    def start_positions(self, context: int) -> int:
        """Return at how many positions a window of context + 1 tokens can start."""
        if self.token_count <= context:
            raise TextError(
                f"the text has {self.token_count:,} tokens, too few for a context of {context:,}"
            )
        return self.token_count - context

    def read_windows(self, begins: Sequence[int], context: int) -> torch.Tensor:
        """Read the windows at these positions: int64 [windows, context + 1]."""
        rows = np.empty((len(begins), context + 1), np.int64)
        for row, begin in zip(rows, begins, strict=True):
            self._read_into(begin, row)
        return torch.from_numpy(rows)

    def _read_into(self, begin: int, row: npt.NDArray[np.int64]) -> None:
        part = int(np.searchsorted(self._ends, begin, side="right"))
        filled = 0
        if part:
            begin -= int(self._ends[part - 1])
        while filled < len(row):
            piece = self._parts[part][begin : begin + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            part += 1
            begin = 0
            filled += len(piece)


def _open_shard(shard: Shard, vocabulary: int, path: Path) -> npt.NDArray[np.unsignedinteger]:
    """Memory-map a shard's tokens after checking them. Raises TextError."""
    file_bytes = path.stat().st_size
    dtype = np.dtype(f"<u{token_bytes(vocabulary)}")
    if file_bytes != shard.tokens * dtype.itemsize or file_bytes == 0:
        raise TextError(
            f"shard {shard.digest[:8]} should hold {shard.tokens:,} tokens; "
            f"its file has {file_bytes:,} bytes"
        )
    if blake3().update_mmap(path).hexdigest() != shard.digest:
        raise TextError(
            f"shard {shard.digest[:8]} is not what its digest says; remove {path} to fetch it again"
        )
    # As a plain array: slices of a memmap object take several times as long, at each window.
    tokens = np.asarray(np.memmap(path, dtype, mode="r"))
    if int(tokens.max()) >= vocabulary:
        raise TextError(
            f"shard {shard.digest[:8]} has token {int(tokens.max())}, "
            f"outside the vocabulary of {vocabulary:,}"
        )
    return tokens
