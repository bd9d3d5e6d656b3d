"""Test the table of a text's pieces: its blocks, its choices by key, and its memory."""

import tracemalloc

import numpy as np
import pytest

from barnraise.text import held_out, spool
from barnraise.text.held_out import choose_held_out, find_smallest
from barnraise.text.source_file import FileReport, Piece
from barnraise.text.spool import DIGEST_DTYPE, LAST_FLAG, DocumentSpool, build_table

SEEDS = range(20)


def write_spool(folder, documents: list[list[str]]) -> DocumentSpool:
    """Write documents, each a list of pieces."""
    written = DocumentSpool(folder)
    for pieces in documents:
        for number, text in enumerate(pieces, 1):
            written.append(Piece(text, is_last=number == len(pieces)))
    written.finish_file(FileReport("documents"))
    written.finish()
    return written


def random_documents(random: np.random.Generator) -> list[list[str]]:
    """Return up to sixty documents of one to five pieces; every fourth is a copy."""
    documents: list[list[str]] = []
    for number in range(int(random.integers(2, 60))):
        if number % 4 == 3:
            documents.append(documents[int(random.integers(number))])
        else:
            count = int(random.integers(1, 6))
            documents.append([f"{number} {piece} " * (piece + 1) for piece in range(count)])
    return documents


@pytest.mark.parametrize("seed", SEEDS)
def test_table_is_the_same_in_blocks_of_any_size(seed, tmp_path, monkeypatch):
    random = np.random.default_rng(seed)
    written = write_spool(tmp_path / "text", random_documents(random))
    whole = build_table(written)
    monkeypatch.setattr(spool, "BLOCK", int(random.integers(1, 9)))
    in_blocks = build_table(written)
    for name in ("lengths", "ends", "has_marks", "used", "keys"):
        assert np.array_equal(getattr(whole, name), getattr(in_blocks, name)), name
    chosen = random.permutation(len(whole.lengths))
    begins = np.cumsum(whole.lengths, dtype=np.int64) - whole.lengths
    assert np.array_equal(in_blocks.find_offsets(chosen), begins[chosen])


@pytest.mark.parametrize("seed", SEEDS)
def test_choices_by_key_are_those_of_sorting_all_keys(seed, monkeypatch):
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 300))
    keys = random.integers(0, 2**64, count, dtype=np.uint64)
    used = random.random(count) < 0.8
    used[:2] = True
    lengths = random.integers(1, 100, count, dtype=np.uint32)
    wanted = int(random.integers(1, count + 5))
    by_key = np.argsort(np.where(used, keys, np.uint64(2**64 - 1)), kind="stable")
    share = float(random.uniform(0.01, 0.9))
    all_at_once = choose_held_out(keys, lengths, used, share)
    monkeypatch.setattr(held_out, "BLOCK", int(random.integers(1, 20)))
    assert np.array_equal(choose_held_out(keys, lengths, used, share), all_at_once)
    monkeypatch.setattr(held_out, "ALL_CANDIDATES", 0)
    assert find_smallest(keys, used, wanted).tolist() == by_key[: min(wanted, used.sum())].tolist()
    chosen = choose_held_out(keys, lengths, used, share)
    assert 0 < chosen.sum() < used.sum() and not chosen[~used].any()


def test_memory_of_many_short_documents_is_twenty_bytes_for_each(tmp_path, monkeypatch):
    """A text of 50 GB has 25 million documents of 2 kB: 0.5 GB."""
    count = 200_000
    written = write_spool(tmp_path / "text", [])
    documents = np.zeros(count, DIGEST_DTYPE)
    documents["high"] = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    documents["pieces"] = 1
    documents.tofile(written.folder / "digests.bin")
    (np.full(count, 2000, "<u4") | np.uint32(LAST_FLAG)).tofile(written.folder / "pieces.bin")
    for module in (spool, held_out):
        monkeypatch.setattr(module, "BLOCK", 4096)
    monkeypatch.setattr(spool, "BUCKET_DOCUMENTS", 4096)
    tracemalloc.start()
    try:
        table = build_table(written)
        held = choose_held_out(table.keys, table.lengths, table.used, 0.02)
        training = table.used & ~held
        table.find_offsets(find_smallest(table.keys, training, 1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 22 * count, f"{peak / count:.1f} bytes a document"
