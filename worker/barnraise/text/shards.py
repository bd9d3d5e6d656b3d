"""Turn a run's documents into token shards and the manifest that names them.

This runs once in a run's life, on the owner's machine: it writes uint16 little-endian shards and
the tokenizer's file as blobs and returns the manifest. It is deterministic: the same documents give
the same digests. The site sees nothing of the text but the manifest.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from barnraise.errors import TextError
from barnraise.protocol.coordinator_messages import Shard, TextManifest
from barnraise.spec import TextSpec
from barnraise.text.tokenizer import encode_documents, load_tokenizer, train_tokenizer

StoreBlob = Callable[[bytes], str]  # stores a blob and returns its BLAKE3 digest


def prepare_text(
    text: TextSpec,
    vocabulary: int,
    run: str,
    store_blob: StoreBlob,
    documents: Sequence[bytes],
    tokenizer_file: bytes | None = None,
) -> TextManifest:
    """Split, tokenise and shard a run's documents.

    Args:
        text: how the text becomes tokens.
        vocabulary: the number of tokens.
        run: the run's id, for the manifest.
        store_blob: stores a blob and returns its BLAKE3 digest.
        documents: the text.
        tokenizer_file: another run's tokenizer; without one, a BPE learns from the training part.

    Raises:
        TextError: the documents or the tokenizer cannot be used.
    """
    training, held_out = split_documents(documents, text.held_out)
    tokenizer = None
    if text.tokenizer == "bpe" and tokenizer_file is not None:
        tokenizer = load_tokenizer(tokenizer_file, vocabulary)
    elif text.tokenizer == "bpe":
        tokenizer = train_tokenizer(training, vocabulary)
    tokenizer_digest = None
    if tokenizer is not None:
        tokenizer_digest = store_blob(tokenizer_file or tokenizer.to_str().encode())
    return TextManifest(
        run=run,
        vocabulary=vocabulary,
        tokenizer=tokenizer_digest,
        train=_store_shards(encode_documents(training, tokenizer), text.shard_tokens, store_blob),
        held_out=_store_shards(
            encode_documents(held_out, tokenizer), text.shard_tokens, store_blob
        ),
    )


def split_documents(documents: Sequence[bytes], share: float) -> tuple[list[bytes], list[bytes]]:
    """Split documents into (training, held out), both in the given order. Pure.

    Whole documents, in the order of their contents' BLAKE3, are held out until `share` of the bytes
    is reached; a document that would exceed it stays in training. Each side gets at least one.

    Raises:
        TextError: there are fewer than two documents.
    """
    if len(documents) < 2:
        raise TextError("the source has fewer than two files, so nothing can be held out")
    bytes_left = share * sum(map(len, documents))
    held_out: set[int] = set()
    by_hash = sorted(range(len(documents)), key=lambda i: blake3(documents[i]).digest())
    for i in by_hash:
        if len(documents[i]) <= bytes_left:
            bytes_left -= len(documents[i])
            held_out.add(i)
    if not held_out:
        held_out = {min(by_hash, key=lambda i: len(documents[i]))}
    if len(held_out) == len(documents):
        held_out.remove(by_hash[-1])
    training = [document for i, document in enumerate(documents) if i not in held_out]
    return training, [documents[i] for i in sorted(held_out)]


def _store_shards(
    tokens: npt.NDArray[np.uint16], shard_tokens: int, store_blob: StoreBlob
) -> list[Shard]:
    parts = [tokens[begin : begin + shard_tokens] for begin in range(0, len(tokens), shard_tokens)]
    return [Shard(digest=store_blob(part.tobytes()), tokens=len(part)) for part in parts]
