"""Prepare the text of a benchmark's run: the standard library's source as bytes."""

from pathlib import Path

from joined_run import RUN
from sharded_documents import shard_documents

from barnraise.ledger.blob_store import BlobStore
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity
from barnraise.spec import TextSpec
from barnraise.text.stdlib_text import read_stdlib

TEXT = TextSpec(tokenizer="bytes")
VOCABULARY = 256  # of bytes


def prepare_text(folder: Path, owner: Identity) -> Signed:
    """Write the text's blobs into a folder.

    Args:
        folder: created if it is missing.
        owner: of the run.

    Returns:
        The text's manifest, signed by the owner.
    """
    store = BlobStore(folder).store
    manifest = shard_documents(TEXT, VOCABULARY, RUN, store, list(read_stdlib()))
    return owner.sign("manifest", manifest)
