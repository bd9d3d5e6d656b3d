"""Text to shards to batches."""

import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from tokenizers import Tokenizer

from barnraise.errors import TextError
from barnraise.protocol.coordinator_messages import Shard, TextManifest
from barnraise.spec import TextSpec
from barnraise.text.shards import END, Text, documents, encode, prepare, split, train_tokenizer

RUN = "01890000-0000-7000-8000-000000000000"


class Folder:
    def __init__(self, path: Path):
        self.path = path

    def put(self, blob: bytes) -> str:
        name = blake3(blob).hexdigest()
        (self.path / name).write_bytes(blob)
        return name

    def locate(self, digest: str) -> Path:
        return self.path / digest


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory) -> tuple[TextManifest, Folder]:
    folder = Folder(tmp_path_factory.mktemp("blobs"))
    return prepare(TextSpec(), 1024, RUN, folder.put), folder


def counted(folder: Folder, *lengths: int) -> Text:
    """Shards of these lengths whose tokens count up from 0, so that a window shows where it was cut."""
    tokens, shards = np.arange(sum(lengths), dtype="<u2"), []
    for length in lengths:
        shards.append(Shard(digest=folder.put(tokens[:length].tobytes()), tokens=length))
        tokens = tokens[length:]
    return Text(
        TextManifest(run=RUN, vocabulary=65536, tokenizer=None, train=shards, held_out=shards),
        folder.locate,
    )


def test_the_standard_library_is_prepared_the_same_way_twice(stdlib, tmp_path):
    manifest, _ = stdlib
    again = prepare(TextSpec(), 1024, RUN, Folder(tmp_path).put)
    assert again == manifest
    assert sum(shard.tokens for shard in manifest.train) > 1_000_000
    assert all(shard.tokens == TextSpec().shard_tokens for shard in manifest.train[:-1])


def test_the_standard_library_comes_without_its_tests_and_each_content_once():
    files = list(documents("stdlib"))
    root = Path(sysconfig.get_paths()["stdlib"])
    assert len(files) == len(set(files)) > 300
    assert (root / "json" / "decoder.py").read_bytes() in files
    left_out = [
        path.read_bytes() for name in ("test", "idlelib") for path in (root / name).glob("*.py")
    ]
    assert not {content for content in left_out if len(content) > 200} & set(files)
    with pytest.raises(TextError, match="wikipedia"):
        list(documents("wikipedia"))


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_whole_files_are_held_out_and_none_is_on_both_sides(share):
    files = list(documents("stdlib"))
    training, held_out = split(files, share)
    assert sorted(training + held_out) == sorted(files) and not set(training) & set(held_out)
    size = sum(map(len, held_out)) / sum(map(len, files))
    assert held_out and share * 0.5 < size <= share
    assert split(list(reversed(files)), share)[1] == held_out[::-1], (
        "which files are chosen depends on them alone"
    )


def test_a_split_leaves_something_on_both_sides_or_says_it_cannot():
    assert split([b"long" * 100, b"short"], 0.001) == ([b"long" * 100], [b"short"])
    assert all(split([b"aa", b"b"], 0.999))
    with pytest.raises(TextError, match="fewer than two files"):
        split([b"alone"], 0.1)


def test_a_bpe_gives_back_every_character_and_keeps_files_apart():
    files = [
        path.encode() for path in ("def f():\n    return '…✓'\n", "import os\n", "x = 1\n" * 50)
    ]
    tokenizer = train_tokenizer(files, 300)
    stream = encode(files, tokenizer)
    end = tokenizer.token_to_id(END)
    assert end == 0 and (stream == end).sum() == 3 and stream[-1] == end and stream.max() < 300
    assert tokenizer.decode(stream.tolist(), skip_special_tokens=False) == END.join(
        f.decode() for f in [*files, b""]
    )


def test_bytes_need_no_tokenizer(tmp_path):
    folder = Folder(tmp_path)
    manifest = prepare(TextSpec(tokenizer="bytes"), 256, RUN, folder.put)
    text = Text(manifest, folder.locate)
    assert manifest.tokenizer is None
    window = text.batch(0, "peer", 0, 1, 200)[0].tolist()
    assert text.decode(window) == bytes(window).decode("utf-8", errors="replace")


def test_a_batch_is_a_pure_function_of_seed_peer_and_step(stdlib):
    manifest, folder = stdlib
    one, two = Text(manifest, folder.locate), Text(manifest, folder.locate)
    batch = one.batch(5, "a" * 64, 17, 8, 64)
    assert (
        batch.shape == (8, 65)
        and batch.dtype == torch.int64
        and batch.min() >= 0
        and batch.max() < 1024
    )
    one.batch(5, "a" * 64, 18, 3, 64)
    assert torch.equal(batch, two.batch(5, "a" * 64, 17, 8, 64))
    for other in ((6, "a" * 64, 17), (5, "b" * 64, 17), (5, "a" * 64, 18)):
        assert not torch.equal(batch, two.batch(*other, 8, 64))
    assert torch.equal(batch[:3], two.batch(5, "a" * 64, 17, 3, 64)), (
        "more sequences go on where fewer stopped"
    )


def test_windows_run_across_shards_and_reach_both_ends(tmp_path):
    text = counted(Folder(tmp_path), 7, 1, 30, 12)
    begins = set()
    for step in range(200):
        for row in text.batch(0, "p", step, 4, 20).tolist():
            assert row == list(range(row[0], row[0] + 21))
            begins.add(row[0])
    assert begins == set(range(50 - 20))


def test_the_held_out_set_is_fixed_spread_out_and_never_overlaps(tmp_path):
    text = counted(Folder(tmp_path), 500, 501)
    batches = text.held_out(20, 32, at_once=8)
    assert [len(batch) for batch in batches] == [8, 8, 4]
    begins = torch.cat(batches)[:, 0].tolist()
    assert (
        begins[0] == 0 and begins[-1] == 1001 - 33 and all(b - a > 32 for a, b in pairwise(begins))
    )
    assert all(
        torch.equal(a, b) for a, b in zip(batches, text.held_out(20, 32, at_once=8), strict=True)
    )
    assert sum(len(batch) for batch in text.held_out(1000, 32)) == 1001 // 33
    assert len(torch.cat(text.held_out(1, 32))) == 1


def test_a_text_shorter_than_the_context_says_so(tmp_path):
    text = counted(Folder(tmp_path), 20)
    assert text.batch(0, "p", 0, 2, 19).tolist() == [list(range(20))] * 2
    with pytest.raises(TextError, match="20 tokens, too few for a context of 20"):
        text.batch(0, "p", 0, 2, 20)
    with pytest.raises(TextError, match="too few"):
        text.held_out(4, 64)


def test_a_shard_that_is_not_what_the_manifest_says_is_refused_by_name(stdlib, tmp_path):
    manifest, _ = stdlib
    folder = Folder(tmp_path)
    good = np.full(1000, 9, "<u2").tobytes()
    name = folder.put(good)
    shard = Shard(digest=name, tokens=1000)
    manifest = manifest.model_copy(update={"train": [shard], "held_out": [shard]})

    def refused(why: str, **change) -> None:
        with pytest.raises(TextError, match=why):
            Text(manifest.model_copy(update=change), folder.locate)

    Text(manifest, folder.locate)
    refused("token 9, outside the vocabulary of 9", vocabulary=9)
    refused("should hold 999 tokens", train=[shard.model_copy(update={"tokens": 999})])
    folder.locate(name).write_bytes(good[:-2] + b"\x08\x00")
    refused(f"shard {name[:8]} is not what its digest says")
    folder.locate(name).write_bytes(good[:-3])
    refused("should hold 1,000 tokens; its file has 1,997 bytes")


def test_the_tokenizer_in_the_blobs_reads_the_shards_back(stdlib):
    manifest, folder = stdlib
    text = Text(manifest, folder.locate)
    tokenizer = Tokenizer.from_file(str(folder.locate(manifest.tokenizer)))
    window = text.held_out(1, 400)[0][0].tolist()
    assert text.decode(window) == tokenizer.decode(window)
    assert tokenizer.get_vocab_size() == 1024
