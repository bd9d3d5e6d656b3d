"""Test how a run's text is fitted into the disk before it is fetched."""

import re
from types import SimpleNamespace

import pytest

from barnraise.errors import PlanError
from barnraise.ledger.blob_store import BlobStore
from barnraise.planning.budgets import FREE_DISK
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import Shard, TextManifest
from barnraise.protocol.signing import digest
from barnraise.training import prefetch
from barnraise.training.prefetch import manifest_blobs, reserve_text

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
SHARD = b"x" * 2_000
FREE = 100_000


@pytest.fixture
def blobs(tmp_path, monkeypatch) -> BlobStore:
    """Return an empty store on a disk with so many bytes free."""
    usage = SimpleNamespace(free=FREE)
    monkeypatch.setattr(prefetch.shutil, "disk_usage", lambda folder: usage)
    return BlobStore(tmp_path)


def text_of(size: int) -> TextManifest:
    """Return the manifest of a text of so many bytes. Its first 2,000 are those of `SHARD`."""
    names = [digest(SHARD), *(digest(str(n)) for n in range(2))]
    parts = [len(SHARD), size - len(SHARD) - 2, 2]
    shards = [Shard(digest=n, tokens=part // 2) for n, part in zip(names, parts, strict=True)]
    return TextManifest(
        run=RUN, vocabulary=256, tokenizer=None, train=shards[:2], held_out=shards[2:]
    )


@pytest.mark.parametrize("disk", [0, 29_998])
def test_text_larger_than_the_disk_that_the_owner_allows_is_refused(blobs, disk):
    assert reserve_text(Limits(), text_of(30_000), blobs) == Limits()
    assert reserve_text(Limits(disk=30_000), text_of(30_000), blobs).disk == 0
    assert reserve_text(Limits(disk=40_000), text_of(30_000), blobs).disk == 10_000
    with pytest.raises(PlanError, match=r"the text of this run takes .* this machine may use"):
        reserve_text(Limits(disk=disk), text_of(30_000), blobs)


def test_text_larger_than_the_disk_counts_only_what_is_not_here(blobs):
    most = int(FREE_DISK * FREE)
    reserve_text(Limits(), text_of(most), blobs)
    with pytest.raises(PlanError, match=re.escape("free some space")):
        reserve_text(Limits(), text_of(most + 2_000), blobs)
    blobs.store(SHARD)
    reserve_text(Limits(), text_of(most + 2_000), blobs)


@pytest.mark.parametrize(("vocabulary", "size"), [(65_536, 2), (65_537, 4)])
def test_shards_are_fetched_with_the_bytes_of_their_tokens(vocabulary, size):
    manifest = text_of(30_000).model_copy(update={"vocabulary": vocabulary})
    sizes = manifest_blobs(manifest)
    assert sizes == {s.digest: size * s.tokens for s in (*manifest.train, *manifest.held_out)}
    assert sum(sizes.values()) == manifest.text_bytes
