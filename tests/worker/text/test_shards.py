"""Documents become shards and a manifest, the same each time."""

import pytest
from helpers.blob_folder import BlobFolder

from barnraise.errors import TextError
from barnraise.spec import TextSpec
from barnraise.text.shards import prepare_text, split_documents
from barnraise.text.sources import read_stdlib

RUN = "01890000-0000-7000-8000-000000000000"


@pytest.mark.integration
def test_prepare_gives_the_same_manifest_twice(stdlib, documents, tmp_path):
    manifest, _ = stdlib
    store = BlobFolder(tmp_path).store
    again = prepare_text(TextSpec(), 1024, RUN, store, documents)
    assert again == manifest
    assert sum(shard.tokens for shard in manifest.train) > 1_000_000
    assert all(shard.tokens == TextSpec().shard_tokens for shard in manifest.train[:-1])


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_split_holds_out_whole_documents_once(share):
    files = list(read_stdlib())
    training, held_out = split_documents(files, share)
    assert sorted(training + held_out) == sorted(files) and not set(training) & set(held_out)
    size = sum(map(len, held_out)) / sum(map(len, files))
    assert held_out and share * 0.5 < size <= share
    assert split_documents(list(reversed(files)), share)[1] == held_out[::-1], (
        "the choice of files does not depend on their order"
    )


def test_split_leaves_something_on_both_sides_or_refuses():
    assert split_documents([b"long" * 100, b"short"], 0.001) == ([b"long" * 100], [b"short"])
    assert all(split_documents([b"aa", b"b"], 0.999))
    with pytest.raises(TextError, match="fewer than two files"):
        split_documents([b"alone"], 0.1)
