"""Batches and the validation set, read from shards that are checked first."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.updates.blob_folder import BlobFolder
from sharded_documents import shard_documents

from barnraise.errors import TextError
from barnraise.protocol.coordinator_messages import Shard, TextManifest
from barnraise.spec import TextSpec
from barnraise.text.batches import TokenDataset

RUN = "01890000-0000-7000-8000-000000000000"


def counting_dataset(folder: BlobFolder, *lengths: int) -> TokenDataset:
    """Create shards whose tokens count up from 0, so that a window shows its position."""
    tokens, shards = np.arange(sum(lengths), dtype="<u2"), []
    for length in lengths:
        shards.append(Shard(digest=folder.store(tokens[:length].tobytes()), tokens=length))
        tokens = tokens[length:]
    manifest = TextManifest(
        run=RUN, vocabulary=65536, tokenizer=None, train=shards, held_out=shards
    )
    return TokenDataset(manifest, folder.locate)


def test_bytes_need_no_tokenizer(documents, tmp_path):
    folder = BlobFolder(tmp_path)
    manifest = shard_documents(TextSpec(tokenizer="bytes"), 256, RUN, folder.store, documents)
    text = TokenDataset(manifest, folder.locate)
    assert manifest.tokenizer is None
    assert text.sample_batch(0, "peer", 0, 1, 200).max() < 256


def test_tokens_of_a_vocabulary_above_16_bits_are_stored_in_32(tmp_path):
    folder = BlobFolder(tmp_path)
    tokens = np.arange(100_000, 100_200, dtype="<u4")
    shard = Shard(digest=folder.store(tokens.tobytes()), tokens=len(tokens))
    manifest = TextManifest(
        run=RUN, vocabulary=128_256, tokenizer=None, train=[shard], held_out=[shard]
    )
    text = TokenDataset(manifest, folder.locate)
    assert manifest.text_bytes == 4 * 400
    assert text.sample_batch(0, "peer", 0, 2, 50).min() >= 100_000


def test_text_of_a_larger_vocabulary_has_the_same_tokens(documents, tmp_path):
    folder, batches = BlobFolder(tmp_path), []
    for vocabulary in (65_536, 65_600):
        manifest = shard_documents(TextSpec(), vocabulary, RUN, folder.store, documents[::10])
        assert manifest.vocabulary == vocabulary
        text = TokenDataset(manifest, folder.locate)
        batches.append(text.sample_batch(0, "peer", 0, 2, 50))
    assert torch.equal(*batches)


def test_batch_is_a_pure_function_of_seed_peer_and_step(stdlib):
    manifest, folder = stdlib
    one, two = TokenDataset(manifest, folder.locate), TokenDataset(manifest, folder.locate)
    batch = one.sample_batch(5, "a" * 64, 17, 8, 64)
    assert batch.shape == (8, 65) and batch.dtype == torch.int64
    assert batch.min() >= 0 and batch.max() < 1024
    one.sample_batch(5, "a" * 64, 18, 3, 64)
    assert torch.equal(batch, two.sample_batch(5, "a" * 64, 17, 8, 64))
    for other in ((6, "a" * 64, 17), (5, "b" * 64, 17), (5, "a" * 64, 18)):
        assert not torch.equal(batch, two.sample_batch(*other, 8, 64))
    assert torch.equal(batch[:3], two.sample_batch(5, "a" * 64, 17, 3, 64)), (
        "a larger batch begins with the sequences of a smaller one"
    )


def test_windows_cross_shards_and_reach_both_ends(tmp_path):
    text = counting_dataset(BlobFolder(tmp_path), 7, 1, 30, 12)
    positions = set()
    for step in range(200):
        for row in text.sample_batch(0, "p", step, 4, 20).tolist():
            assert row == list(range(row[0], row[0] + 21))
            positions.add(row[0])
    assert positions == set(range(50 - 20))


def test_validation_set_is_fixed_spread_and_without_overlap(tmp_path):
    text = counting_dataset(BlobFolder(tmp_path), 500, 501)
    batches = text.validation_batches(20, 32, batch_sequences=8)
    assert [len(batch) for batch in batches] == [8, 8, 4]
    positions = torch.cat(batches)[:, 0].tolist()
    assert positions[0] == 0 and positions[-1] == 1001 - 33
    assert all(later - earlier > 32 for earlier, later in pairwise(positions))
    again = text.validation_batches(20, 32, batch_sequences=8)
    assert all(map(torch.equal, batches, again)) and len(again) == len(batches)
    assert sum(len(batch) for batch in text.validation_batches(1000, 32)) == 1001 // 33
    assert len(torch.cat(text.validation_batches(1, 32))) == 1


def test_text_shorter_than_the_context_is_refused(tmp_path):
    text = counting_dataset(BlobFolder(tmp_path), 20)
    assert text.sample_batch(0, "p", 0, 2, 19).tolist() == [list(range(20))] * 2
    with pytest.raises(TextError, match="20 tokens, too few for a context of 20"):
        text.sample_batch(0, "p", 0, 2, 20)
    with pytest.raises(TextError, match="too few"):
        text.validation_batches(4, 64)


def test_shard_that_differs_from_the_manifest_is_refused(stdlib, tmp_path):
    manifest, _ = stdlib
    folder = BlobFolder(tmp_path)
    valid = np.full(1000, 9, "<u2").tobytes()
    name = folder.store(valid)
    shard = Shard(digest=name, tokens=1000)
    manifest = manifest.model_copy(update={"train": [shard], "held_out": [shard]})

    def assert_refused(reason: str, **change) -> None:
        with pytest.raises(TextError, match=reason):
            TokenDataset(manifest.model_copy(update=change), folder.locate)

    TokenDataset(manifest, folder.locate)
    assert_refused("token 9, outside the vocabulary of 9", vocabulary=9)
    assert_refused("should hold 999 tokens", train=[shard.model_copy(update={"tokens": 999})])
    folder.locate(name).write_bytes(valid[:-2] + b"\x08\x00")
    assert_refused(f"shard {name[:8]} is not what its digest says")
    folder.locate(name).write_bytes(valid[:-3])
    assert_refused("should hold 1,000 tokens; its file has 1,997 bytes")
