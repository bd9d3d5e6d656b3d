"""Turn a run's documents into token shards and the manifest that names them.

This runs once in a run's life, on the owner's machine: it writes little-endian shards and the
tokenizer's file as blobs and returns the manifest. It is deterministic: the same documents give
the same digests, on any number of cores and after any number of interruptions. The site sees
nothing of the text but the manifest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from barnraise.errors import TextError
from barnraise.protocol.coordinator_messages import Shard, TextManifest
from barnraise.spec import MAX_PROMPT_TOKENS, MAX_SHARD_TOKENS, TextSpec, token_bytes
from barnraise.text.documents import PIECE_CHARACTERS
from barnraise.text.held_out import choose_held_out, find_smallest
from barnraise.text.progress import ReportProgress, ignore_progress
from barnraise.text.spool import DocumentSpool, PieceTable, RowFile, build_table
from barnraise.text.tokenising import tokenise
from barnraise.text.tokenizer import (
    END_BYTE,
    TOKENIZER_SAMPLE_BYTES,
    count_tokens,
    encode_pieces,
    find_end_token,
    load_tokenizer,
    round_vocabulary,
    train_tokenizer,
)
from barnraise.text.tokenizer_file import read_tokenizer_file

StoreBlob = Callable[[bytes], str]  # stores a blob and returns its BLAKE3 digest
MAX_TRAIN_SHARDS = 1000  # in a manifest
MAX_HELD_OUT_SHARDS = 100
HELD_OUT_PIECES = 8  # the least number in the held-out part of a short text
MIN_PIECE_CHARACTERS = 32
# Bytes of text that a token stands for, to tell a text that is too short before it is tokenised.
BYTES_PER_TOKEN = {"bytes": 1.0, "bpe": 2.0}
BYTES_PER_TOKEN_AT_MOST = {"bytes": 1.0, "bpe": 8.0}


@dataclass(frozen=True)
class TextPlan:
    """What the documents become.

    Attributes:
        text: how they become tokens.
        vocabulary: the number of tokens that the run asks for.
        run: the run's id, for the manifest.
        context: tokens that the model sees at once; each part of the text must be longer.
        tokenizer_file: an existing tokenizer; without one, a BPE learns from the training part.
        may_shrink: whether the vocabulary may become smaller, if the text has fewer tokens.
        prompts: texts that machines continue, which travel as tokens.
    """

    text: TextSpec = field(default_factory=TextSpec)
    vocabulary: int = 2048
    run: str = ""
    context: int = 0
    tokenizer_file: bytes | None = None
    may_shrink: bool = True
    prompts: tuple[str, ...] = ()


def check_length(text_bytes: int, tokenizer: str, context: int) -> None:
    """Refuse a text that is too short, before anything is done with it.

    Raises:
        TextError: with how much is needed.
    """
    needed = math.ceil(2 * (context + 1) * BYTES_PER_TOKEN[tokenizer])
    if text_bytes < needed:
        raise TextError(
            f"the text is too short: it has {text_bytes:,} bytes, and a context of {context:,} "
            f"tokens needs at least {needed:,} (a training and a held-out part, each longer than "
            "the context)"
        )


def build_shards(
    spool: DocumentSpool,
    plan: TextPlan,
    store_blob: StoreBlob,
    progress: ReportProgress = ignore_progress,
) -> TextManifest:
    """Split, tokenise and shard the documents of a spool.

    Raises:
        TextError: the documents or the tokenizer cannot be used.
    """
    table, held_out = split_pieces(spool, plan)
    tokenizer = _choose_tokenizer(spool, table, held_out, plan)
    vocabulary = plan.vocabulary
    digest = None
    if tokenizer is not None:
        if plan.may_shrink:
            vocabulary = min(vocabulary, round_vocabulary(count_tokens(tokenizer)))
        file = plan.tokenizer_file or tokenizer.to_str().encode()
        digest = store_blob(read_tokenizer_file(file, "the tokenizer"))
    dtype = np.dtype(f"<u{token_bytes(vocabulary)}")
    train, held_out_tokens = tokenise(spool, table, held_out, tokenizer, dtype, progress)
    for name, tokens in (("training", train), ("held-out", held_out_tokens)):
        if len(tokens) <= plan.context:
            needed = math.ceil(1.2 * table.used_bytes * (plan.context + 1) / max(1, len(tokens)))
            raise TextError(
                f"the text is too short: its {name} part has {len(tokens):,} tokens, and a context "
                f"of {plan.context:,} needs more; about {needed:,} bytes of text would do"
            )
    shard_tokens = plan.text.shard_tokens
    return TextManifest(
        run=plan.run,
        vocabulary=vocabulary,
        tokenizer=digest,
        train=_store_shards(train, shard_tokens, MAX_TRAIN_SHARDS, store_blob),
        held_out=_store_shards(held_out_tokens, shard_tokens, MAX_HELD_OUT_SHARDS, store_blob),
        prompts=_encode_prompts(plan.prompts, tokenizer),
    )


def _encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the last tokens of each prompt; one that has none begins after a document."""
    end = END_BYTE if tokenizer is None else find_end_token(tokenizer)
    pieces = ((prompt.encode(), False) for prompt in prompts)
    return [ids.tolist()[-MAX_PROMPT_TOKENS:] or [end] for ids in encode_pieces(pieces, tokenizer)]


def split_pieces(spool: DocumentSpool, plan: TextPlan) -> tuple[PieceTable, npt.NDArray[np.bool_]]:
    """Return the pieces of a text, and which of them are held out.

    A short text is cut into smaller pieces, so that the held-out part consists of several.

    Raises:
        TextError: the text is too short for a held-out part.
    """
    kind = plan.text.tokenizer
    table = build_table(spool)
    total = table.used_bytes
    check_length(total, kind, plan.context)
    least = math.ceil((plan.context + 1) * BYTES_PER_TOKEN_AT_MOST[kind])
    wanted = max(plan.text.held_out * total, min(least, total / 2))
    piece_characters = max(MIN_PIECE_CHARACTERS, int(wanted / HELD_OUT_PIECES))
    is_short = piece_characters < PIECE_CHARACTERS
    if is_short and int(np.max(table.lengths, where=table.used, initial=0)) > piece_characters:
        table = build_table(spool, piece_characters)
    if int(table.used.sum()) < 2:
        table = build_table(spool, max(1, total // 4))
    if int(table.used.sum()) < 2:
        raise TextError(
            f"the text is too short: it has {total:,} bytes, and no part can be held out"
        )
    held_out = choose_held_out(table.keys, table.lengths, table.used, plan.text.held_out, least)
    return table, held_out


def _choose_tokenizer(
    spool: DocumentSpool, table: PieceTable, held_out: npt.NDArray[np.bool_], plan: TextPlan
) -> Tokenizer | None:
    if plan.text.tokenizer == "bytes":
        return None
    if plan.tokenizer_file is not None:
        return load_tokenizer(plan.tokenizer_file, plan.vocabulary)
    return train_tokenizer(_sample_pieces(spool, table, held_out), plan.vocabulary)


def _sample_pieces(
    spool: DocumentSpool, table: PieceTable, held_out: npt.NDArray[np.bool_]
) -> list[bytes]:
    """Read pieces of the training part, in the order of their keys, up to the sample's size."""
    training = table.used & ~held_out
    total = int(training.sum())
    average = max(1, int(np.sum(table.lengths, where=training, dtype=np.int64)) // max(1, total))
    smallest = find_smallest(table.keys, training, 4 * TOKENIZER_SAMPLE_BYTES // average + 16)
    offsets = table.find_offsets(smallest)
    sample: list[bytes] = []
    left = TOKENIZER_SAMPLE_BYTES
    with spool.open_content() as content:
        for index, offset in zip(smallest.tolist(), offsets.tolist(), strict=True):
            content.seek(offset)
            sample.append(content.read(int(table.lengths[index])))
            left -= len(sample[-1])
            if left <= 0:
                break
    return sample


def _store_shards(
    tokens: RowFile, shard_tokens: int, most: int, store_blob: StoreBlob
) -> list[Shard]:
    """Store tokens as shards; larger ones than asked for where a manifest cannot name so many."""
    size = max(shard_tokens, math.ceil(len(tokens) / most))
    if size > MAX_SHARD_TOKENS:
        raise TextError(
            f"the text is too long: a part of it has {len(tokens):,} tokens, and a run's text at "
            f"most {most * MAX_SHARD_TOKENS:,} there"
        )
    shards: list[Shard] = []
    for begin in range(0, len(tokens), size):
        part = tokens.read(begin, size)
        shards.append(Shard(digest=store_blob(part.tobytes()), tokens=len(part)))
    return shards
