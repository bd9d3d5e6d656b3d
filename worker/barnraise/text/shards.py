"""From source text to token shards, and from shards to batches.

`prepare` runs once in a run's life, on the owner's machine: it writes uint16 little-endian shards and the tokenizer's
file as blobs and returns the manifest that names them. `Text` reads them on every machine. Both are deterministic: the
same files give the same digests, the same (seed, peer, step) the same batch. The site never sees any of it but the
manifest.
"""

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from barnraise.errors import TextError
from barnraise.protocol.coordinator_messages import Shard, TextManifest
from barnraise.spec import TextSpec

END = "<|endoftext|>"  # token 0 of a BPE: between two files. With bytes it is byte 0
NOT_TEXT = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
}  # folders of the standard library that are left out
TOKENIZER_SAMPLE = 4 << 20  # bytes a BPE learns from; more takes longer and changes little
ENCODE_AT_ONCE = 1 << 20  # bytes
TOKEN = np.dtype("<u2")


# ---- once: preparing -------------------------------------------------------------------------------------------


def prepare(
    text: TextSpec,
    vocabulary: int,
    run: str,
    put: Callable[[bytes], str],
    found: list[bytes] | None = None,
    known: bytes | None = None,
) -> TextManifest:
    """Builds the run's text of the documents `found`, else of the standard library, with the tokenizer's file `known`,
    where it is given, else one learnt from them. `put` keeps a blob and returns its BLAKE3 digest. Raises TextError."""
    training, held_out = split(
        list(documents(text.source)) if found is None else found, text.held_out
    )
    tokenizer = None
    if text.tokenizer == "bpe":
        tokenizer = (
            _tokenizer(known, vocabulary)
            if known is not None
            else train_tokenizer(training, vocabulary)
        )
    return TextManifest(
        run=run,
        vocabulary=vocabulary,
        tokenizer=put(known or tokenizer.to_str().encode()) if tokenizer else None,
        train=_shards(encode(training, tokenizer), text.shard_tokens, put),
        held_out=_shards(encode(held_out, tokenizer), text.shard_tokens, put),
    )


def documents(source: str) -> Iterator[bytes]:
    """The source's files in a fixed order, each content once (a copy could otherwise sit on both sides of the split).

    `stdlib`: `*.py` of this Python's standard library without NOT_TEXT, sorted by path."""
    if source != "stdlib":
        raise TextError(f"the source '{source}' is not one this version can read")
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = sorted(
        (path.as_posix(), path) for path in paths if not NOT_TEXT & set(path.parent.parts)
    )
    if not paths:
        raise TextError(
            f"there are no *.py files under {root}: this Python came without its library's source"
        )
    seen: set[bytes] = set()
    for _, path in paths:
        content = (root / path).read_bytes()
        name = blake3(content).digest()
        if content and name not in seen:
            seen.add(name)
            yield content


def split(files: list[bytes], share: float) -> tuple[list[bytes], list[bytes]]:
    """(training, held out), both in the order given. Whole files, in the order of their contents' BLAKE3, are held out
    until `share` of the bytes is reached; a file that would go past it is left in training. At least one each."""
    if len(files) < 2:
        raise TextError("the source has fewer than two files, so nothing can be held out")
    left, chosen = share * sum(map(len, files)), set()
    by_hash = sorted(range(len(files)), key=lambda i: blake3(files[i]).digest())
    for i in by_hash:
        if len(files[i]) <= left:
            left -= len(files[i])
            chosen.add(i)
    chosen = chosen or {min(by_hash, key=lambda i: len(files[i]))}
    if len(chosen) == len(files):
        chosen.remove(by_hash[-1])
    return [f for i, f in enumerate(files) if i not in chosen], [files[i] for i in sorted(chosen)]


def train_tokenizer(files: list[bytes], vocabulary: int) -> Tokenizer:
    """A byte-level BPE (GPT-2's kind) of `vocabulary` tokens, END among them, learnt from a sample of whole files."""
    sample, size = [], 0
    for content in sorted(files, key=lambda content: blake3(content).digest()):
        if size + len(content) <= TOKENIZER_SAMPLE:
            size += len(content)
            sample.append(_characters(content))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _tokenizer(file: bytes, vocabulary: int) -> Tokenizer:
    """Another run's, from its file. Raises TextError."""
    try:
        tokenizer = Tokenizer.from_buffer(file)
    except Exception as error:  # tokenizers raises nothing narrower
        raise TextError(
            f"the tokenizer of the run this one begins with cannot be read: {error}"
        ) from None
    if tokenizer.get_vocab_size() > vocabulary or tokenizer.token_to_id(END) is None:
        raise TextError(
            f"the tokenizer of the run this one begins with is not of {vocabulary:,} tokens"
        )
    return tokenizer


def encode(files: list[bytes], tokenizer: Tokenizer | None) -> np.ndarray:
    """One uint16 stream: each file, then the end token."""
    if tokenizer is None:
        return np.frombuffer(b"".join(content + b"\0" for content in files), np.uint8).astype(TOKEN)
    end, parts, waiting, size = tokenizer.token_to_id(END), [], [], 0
    for position, content in enumerate(files):
        waiting.append(_characters(content))
        size += len(content)
        if size >= ENCODE_AT_ONCE or position == len(files) - 1:  # all at once would take gigabytes
            parts += [
                np.array([*found.ids, end], TOKEN) for found in tokenizer.encode_batch_fast(waiting)
            ]
            waiting, size = [], 0
    return np.concatenate(parts)


def _characters(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")


def _shards(tokens: np.ndarray, size: int, put: Callable[[bytes], str]) -> list[Shard]:
    parts = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
    return [Shard(digest=put(part.tobytes()), tokens=len(part)) for part in parts]


# ---- always: reading -------------------------------------------------------------------------------------------


class Text:
    """A run's tokens, memory-mapped. `locate` gives a blob's file by its digest. Raises TextError, naming the blob, for
    a shard that is not what the manifest says: its length, its digest, or a token outside the vocabulary."""

    def __init__(self, manifest: TextManifest, locate: Callable[[str], Path]):
        self.manifest = manifest
        self._train = _Stream(manifest.train, manifest.vocabulary, locate)
        self._held_out = _Stream(manifest.held_out, manifest.vocabulary, locate)
        self._tokenizer = manifest.tokenizer and Path(locate(manifest.tokenizer))

    @property
    def tokens(self) -> int:
        """Of the training part."""
        return self._train.tokens

    def batch(self, seed: int, peer: str, step: int, sequences: int, context: int) -> torch.Tensor:
        """int64 [sequences, context + 1], a pure function of the arguments: each row starts at a place drawn from
        BLAKE3 of (seed, peer, step)."""
        room = self._train.room(context)
        drawn = blake3(f"barnraise/batch/v1/{seed}/{peer}/{step}".encode()).digest(
            length=8 * sequences
        )
        return self._train.windows(
            (np.frombuffer(drawn, "<u8") % np.uint64(room)).tolist(), context
        )

    def held_out(self, sequences: int, context: int, at_once: int = 8) -> list[torch.Tensor]:
        """The fixed validation set: up to `sequences` windows spread evenly, none overlapping, in batches of
        `at_once`."""
        room = self._held_out.room(context)
        count = max(1, min(sequences, self._held_out.tokens // (context + 1)))
        begins = [i * (room - 1) // max(1, count - 1) for i in range(count)]
        return [
            self._held_out.windows(begins[i : i + at_once], context)
            for i in range(0, count, at_once)
        ]

    def decode(self, tokens: list[int]) -> str:
        """Back to characters, for people to look at."""
        if self._tokenizer is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        return Tokenizer.from_file(str(self._tokenizer)).decode(tokens)


class _Stream:
    """Shards end to end."""

    def __init__(self, shards: list[Shard], vocabulary: int, locate: Callable[[str], Path]):
        self._parts = [_open(shard, vocabulary, Path(locate(shard.digest))) for shard in shards]
        self._ends = np.cumsum([len(part) for part in self._parts])
        self.tokens = int(self._ends[-1])

    def room(self, context: int) -> int:
        """How many places a window of context + 1 tokens can start at."""
        if self.tokens <= context:
            raise TextError(
                f"the text has {self.tokens:,} tokens, too few for a context of {context:,}"
            )
        return self.tokens - context

    def windows(self, begins: list[int], context: int) -> torch.Tensor:
        rows = np.empty((len(begins), context + 1), np.int64)
        for row, begin in zip(rows, begins, strict=True):
            self._read(begin, row)
        return torch.from_numpy(rows)

    def _read(self, begin: int, row: np.ndarray) -> None:
        part, filled = int(np.searchsorted(self._ends, begin, side="right")), 0
        begin -= int(self._ends[part - 1]) if part else 0
        while filled < len(row):
            piece = self._parts[part][begin : begin + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            part, begin, filled = part + 1, 0, filled + len(piece)


def _open(shard: Shard, vocabulary: int, path: Path) -> np.ndarray:
    size = path.stat().st_size
    if size != shard.tokens * TOKEN.itemsize or size == 0:
        raise TextError(
            f"shard {shard.digest[:8]} should hold {shard.tokens:,} tokens; its file has {size:,} bytes"
        )
    if blake3().update_mmap(path).hexdigest() != shard.digest:
        raise TextError(
            f"shard {shard.digest[:8]} is not what its digest says; remove {path} to fetch it again"
        )
    tokens = np.memmap(path, TOKEN, mode="r")
    if int(tokens.max()) >= vocabulary:
        raise TextError(
            f"shard {shard.digest[:8]} has token {int(tokens.max())}, outside the vocabulary of {vocabulary:,}"
        )
    return tokens
