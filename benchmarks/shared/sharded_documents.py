"""Make a run's text of documents that lie in memory, for tests and benchmarks."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.spec import TextSpec
from barnraise.text.shards import StoreBlob, TextPlan, build_shards
from barnraise.text.source_file import FileReport, Piece
from barnraise.text.spool import DocumentSpool


def shard_documents(
    text: TextSpec,
    vocabulary: int,
    run: str,
    store_blob: StoreBlob,
    documents: Iterable[bytes],
    tokenizer_file: bytes | None = None,
) -> TextManifest:
    """Split, tokenise and shard documents that lie in memory; see `TextPlan`.

    Raises:
        TextError: the documents or the tokenizer cannot be used.
    """
    plan = TextPlan(text, vocabulary, run, tokenizer_file=tokenizer_file, may_shrink=False)
    with tempfile.TemporaryDirectory(prefix="barnraise-") as folder:
        spool = DocumentSpool(Path(folder) / "text")
        for document in documents:
            spool.append(Piece(document.decode("utf-8", errors="replace")))
        spool.finish_file(FileReport("documents"))
        spool.finish()
        return build_shards(spool, plan, store_blob)
