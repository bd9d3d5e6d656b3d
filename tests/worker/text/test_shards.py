"""Documents become shards and a manifest, the same each time, also after an interruption."""

import json

import numpy as np
import pytest
from helpers.updates.blob_folder import BlobFolder
from sharded_documents import shard_documents
from tokenizers import Tokenizer

from barnraise.errors import TextError
from barnraise.spec import TextSpec
from barnraise.text import shards, tokenising
from barnraise.text.documents import cut_stream
from barnraise.text.held_out import choose_held_out
from barnraise.text.shards import TextPlan, build_shards
from barnraise.text.source_file import FileReport, Piece
from barnraise.text.spool import DocumentSpool, build_table, find_duplicates
from barnraise.text.tokenizer import END_BYTE, END_TOKEN

RUN = "01890000-0000-7000-8000-000000000000"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
BYTES = TextSpec(tokenizer="bytes", held_out=0.1)


def some_documents(count: int, words: int = 60) -> list[bytes]:
    generator = np.random.default_rng(0)
    return [f"{i} {' '.join(generator.choice(WORDS, words))}.".encode() for i in range(count)]


def fill(folder, documents: list[bytes]) -> DocumentSpool:
    spool = DocumentSpool(folder, "same")
    for document in documents:
        spool.append(Piece(document.decode()))
    spool.finish_file(FileReport("a"))
    spool.finish()
    return spool


def read_streams(manifest, folder: BlobFolder) -> list[np.ndarray]:
    return [
        np.concatenate([np.fromfile(folder.locate(s.digest), "<u2") for s in part])
        for part in (manifest.train, manifest.held_out)
    ]


@pytest.mark.integration
def test_prepare_gives_the_same_manifest_twice(stdlib, documents, tmp_path):
    manifest, _ = stdlib
    store = BlobFolder(tmp_path).store
    again = shard_documents(TextSpec(), 1024, RUN, store, documents)
    assert again == manifest
    assert sum(shard.tokens for shard in manifest.train) > 1_000_000
    assert all(shard.tokens == TextSpec().shard_tokens for shard in manifest.train[:-1])


def test_shards_of_a_text_never_change(tmp_path):
    """A change of these digests means that machines of two versions prepare different texts."""
    manifest = shard_documents(BYTES, 256, RUN, BlobFolder(tmp_path).store, some_documents(50))
    assert [shard.digest[:16] for shard in (*manifest.train, *manifest.held_out)] == PINNED


PINNED = ["0e8478505a0d48b5", "7155533ea1b558da"]


@pytest.mark.parametrize("stop_after", [1, 4])
def test_tokenising_continues_after_an_interruption(tmp_path, monkeypatch, stop_after):
    monkeypatch.setattr(tokenising, "CHUNK_BYTES", 4_000)
    monkeypatch.setattr(tokenising, "COMMIT_SECONDS", 0.0)
    texts = some_documents(200)
    plan = TextPlan(TextSpec(held_out=0.1), 320, RUN)
    blobs = BlobFolder(tmp_path)
    undisturbed = build_shards(fill(tmp_path / "one", texts), plan, blobs.store)
    seen = []

    def interrupt(stage: str, done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == stop_after + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_shards(fill(tmp_path / "two", texts), plan, blobs.store, interrupt)
    spool = DocumentSpool(tmp_path / "two", "same")
    assert spool.was_resumed and spool.state.is_complete
    steps = []
    resumed = build_shards(spool, plan, blobs.store, lambda *progress: steps.append(progress[1]))
    assert resumed == undisturbed
    assert steps[0] > 0, "it does not begin at the start"


def test_reading_continues_at_the_next_file(tmp_path):
    spool = DocumentSpool(tmp_path / "a", "same")
    spool.append(Piece("first file"))
    spool.finish_file(FileReport("1"))
    spool.append(Piece("cut off by a kill"))
    spool.close()
    spool = DocumentSpool(tmp_path / "a", "same")
    assert spool.state.files == 1
    spool.append(Piece("second file"))
    spool.finish_file(FileReport("2"))
    spool.finish()
    assert spool.open_content().read() == b"first filesecond file"
    assert not DocumentSpool(tmp_path / "a", "other text").was_resumed


def test_several_processes_give_the_same_shards(tmp_path, monkeypatch):
    texts = some_documents(120)
    plan = TextPlan(TextSpec(held_out=0.1), 320, RUN)
    blobs = BlobFolder(tmp_path)
    alone = build_shards(fill(tmp_path / "one", texts), plan, blobs.store)
    monkeypatch.setattr(tokenising, "CHUNK_BYTES", 4_000)
    monkeypatch.setattr(tokenising, "POOL_BYTES", 0)
    assert build_shards(fill(tmp_path / "two", texts), plan, blobs.store) == alone


# ---- the split


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_held_out_pieces_are_near_the_share_whatever_their_order(tmp_path, share):
    texts = some_documents(400)
    table = build_table(fill(tmp_path / "a", texts))
    held_out = choose_held_out(table.keys, table.lengths, table.used, share)
    size = table.lengths[held_out].sum() / table.lengths.sum()
    assert held_out.any() and (share * 0.5 < size <= share or held_out.sum() == 1)
    reverse = build_table(fill(tmp_path / "b", texts[::-1]))
    again = choose_held_out(reverse.keys, reverse.lengths, reverse.used, share)
    assert (again[::-1] == held_out).all()


def test_copies_are_used_once(tmp_path):
    texts = some_documents(30)
    spool = fill(tmp_path / "a", texts + texts[::-1] + [b"another"])
    duplicates = find_duplicates(spool.documents)
    assert duplicates.tolist() == [False] * 30 + [True] * 30 + [False]
    manifests = [
        shard_documents(BYTES, 256, RUN, BlobFolder(tmp_path).store, given)
        for given in (texts, texts + texts)
    ]
    assert manifests[0] == manifests[1]


SHORT = {
    "one huge line": "word " * 3000,
    "sentences": "This is a sentence. " * 300,
    "CR line ends": "A line of text.\n" * 300,
    "no boundaries": "x" * 5000,
    "Chinese": "这是一个句子。" * 400,
    "short": "A short text of a few words, and no more than that.",
}


@pytest.mark.parametrize("kind", SHORT)
def test_single_document_is_cut_so_that_a_part_is_held_out(tmp_path, kind):
    text = SHORT[kind].encode()
    blobs = BlobFolder(tmp_path)
    manifest = shard_documents(BYTES, 256, RUN, blobs.store, [text])
    train, held_out = read_streams(manifest, blobs)
    assert 0 < len(held_out) < len(train)
    joined = bytes(token for stream in (train, held_out) for token in stream.tolist())
    assert sorted(joined.replace(bytes([END_BYTE]), b"")) == sorted(text), "nothing is lost"


def test_text_that_is_too_short_is_refused_before_it_is_tokenised(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "tokenise", None)
    plan = TextPlan(BYTES, 256, RUN, context=128)
    with pytest.raises(TextError, match=r"has 100 bytes.*context of 128 tokens needs at least 258"):
        build_shards(fill(tmp_path / "a", [b"x" * 100]), plan, BlobFolder(tmp_path).store)


def test_short_text_has_a_held_out_part_longer_than_the_context(tmp_path):
    blobs = BlobFolder(tmp_path)
    for tokenizer in ("bytes", "bpe"):
        plan = TextPlan(TextSpec(tokenizer=tokenizer), 512, RUN, context=64)
        spool = fill(tmp_path / tokenizer, [b" ".join(some_documents(8))])
        manifest = build_shards(spool, plan, blobs.store)
        assert min(map(len, read_streams(manifest, blobs))) > 64


@pytest.mark.parametrize("parts", [1, 7, 100_000])
def test_cutting_a_stream_does_not_depend_on_its_parts(parts):
    text = "".join(SHORT.values())
    divided = [text[begin : begin + parts] for begin in range(0, len(text), parts)]
    pieces = list(cut_stream(divided, 500))
    assert pieces == list(cut_stream([text], 500))
    assert all(len(piece) <= 500 for piece in pieces)
    assert "".join(pieces) == text


# ---- the tokenizer


def test_text_that_spells_a_special_token_stays_text(tmp_path):
    texts = [f"a {END_TOKEN} b {i}".encode() for i in range(60)]
    blobs = BlobFolder(tmp_path)
    manifest = shard_documents(TextSpec(held_out=0.1), 300, RUN, blobs.store, texts)
    tokenizer = Tokenizer.from_file(str(blobs.locate(manifest.tokenizer)))
    end = tokenizer.token_to_id(END_TOKEN)
    streams = read_streams(manifest, blobs)
    assert sum(int((stream == end).sum()) for stream in streams) == len(texts)
    assert END_TOKEN in tokenizer.decode(streams[0].tolist(), skip_special_tokens=True)


def test_nul_in_bytes_stays_text_and_the_end_is_no_byte_of_a_text(tmp_path):
    texts = [f"a\0b{i}".encode() for i in range(60)]
    blobs = BlobFolder(tmp_path)
    manifest = shard_documents(BYTES, 256, RUN, blobs.store, texts)
    streams = read_streams(manifest, blobs)
    assert sum(int((stream == 0).sum()) for stream in streams) == 60
    assert sum(int((stream == END_BYTE).sum()) for stream in streams) == 60


def test_one_long_document_is_sampled_in_parts(tmp_path):
    generator = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(generator.choice(letters, 6)) for _ in range(900)]
    long = " ".join(generator.choice(words, 60_000)).encode()
    manifest = build_shards(
        fill(tmp_path / "a", [long]), TextPlan(TextSpec(), 1024, RUN), BlobFolder(tmp_path).store
    )
    assert manifest.vocabulary == 1024


def test_vocabulary_shrinks_to_the_tokens_of_the_text(tmp_path):
    texts = [b"tiny tiny text %d" % i for i in range(20)]
    plan = TextPlan(TextSpec(held_out=0.1), 2048, RUN)
    manifest = build_shards(fill(tmp_path / "a", texts), plan, BlobFolder(tmp_path).store)
    assert manifest.vocabulary == 320


def test_existing_tokenizer_must_fit_and_end_documents(tmp_path):
    blobs = BlobFolder(tmp_path)
    texts = some_documents(40)
    first = shard_documents(TextSpec(held_out=0.1), 320, RUN, blobs.store, texts)
    file = blobs.locate(first.tokenizer).read_bytes()
    second = shard_documents(TextSpec(held_out=0.1), 512, RUN, blobs.store, texts, file)
    assert second.tokenizer == first.tokenizer and second.train == first.train
    with pytest.raises(TextError, match=r"more than the vocabulary of 300.*to 320"):
        shard_documents(TextSpec(), 300, RUN, blobs.store, texts, file)
    with pytest.raises(TextError, match="cannot be read"):
        shard_documents(TextSpec(), 512, RUN, blobs.store, texts, b"{}")
    nameless = json.loads(file)
    nameless["added_tokens"] = []
    vocabulary = nameless["model"]["vocab"]
    vocabulary["other"] = vocabulary.pop(END_TOKEN)
    with pytest.raises(TextError, match="no token that ends a text"):
        shard_documents(TextSpec(), 512, RUN, blobs.store, texts, json.dumps(nameless).encode())


def test_text_of_more_shards_than_a_manifest_holds_gets_larger_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_TRAIN_SHARDS", 3)
    plan = TextPlan(TextSpec(tokenizer="bytes", shard_tokens=100), 256, RUN)
    blobs = BlobFolder(tmp_path)
    manifest = build_shards(fill(tmp_path / "a", some_documents(50)), plan, blobs.store)
    assert len(manifest.train) == 3
