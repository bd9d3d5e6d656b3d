"""Blobs appear whole, verified and durable, in whatever pieces they arrive."""

import errno
import os
import stat
import sys
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from blake3 import blake3
from helpers.effort import examples
from hypothesis import example, given, settings

from barnraise.ledger import blob_store
from barnraise.ledger.blob_store import EMPTY_DIGEST, AppendResult, BlobStore

DATA = bytes(range(256)) * 4
NAME = blake3(DATA).hexdigest()


def append_in_two_pieces(blobs: BlobStore) -> None:
    blobs.append_piece(NAME, 0, DATA[:400], len(DATA))
    blobs.append_piece(NAME, 400, DATA[400:], len(DATA))


@pytest.mark.parametrize(
    "store",
    [
        lambda blobs: blobs.store(DATA),
        lambda blobs: blobs.append_piece(NAME, 0, DATA, len(DATA)),
        append_in_two_pieces,
    ],
    ids=["whole", "in one piece", "in two pieces"],
)
def test_blob_is_fsynced_before_it_has_its_name(tmp_path, monkeypatch, store):
    blobs, events = BlobStore(tmp_path), []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(fd: int) -> None:
        status = os.fstat(fd)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        fsync(fd)

    def recorded_replace(source: str, target: str) -> None:
        events.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    store(blobs)
    assert events == ["folder", len(DATA), "name", "folder"] and blobs.read(NAME) == DATA


def test_names_of_blobs_do_not_fill_pythons_table_of_strings(tmp_path, monkeypatch):
    blobs, interned, intern = BlobStore(tmp_path), [], sys.intern

    def recorded_intern(text: str) -> str:
        interned.append(text)
        return intern(text)

    monkeypatch.setattr(sys, "intern", recorded_intern)
    name = blobs.store(DATA)
    append_in_two_pieces(blobs)
    assert blobs.read(name) == DATA and blobs.size(name) == len(DATA) and blobs.has(name)
    blobs.delete(name)
    assert not [text for text in interned if name in text]
    assert name in str(blobs.path(name)) and name in interned, "a path has the name as a part"


def test_blob_store_full_disk_leaves_nothing_of_a_blob(tmp_path, monkeypatch):
    blobs = BlobStore(tmp_path)

    def fail_for_files(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for_files)
        with pytest.raises(OSError, match="No space left"):
            blobs.store(DATA)
        with pytest.raises(OSError, match="No space left"):
            blobs.append_piece(NAME, 0, DATA, len(DATA))
    assert not blobs.has(NAME) and not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert blobs.store(DATA) == NAME


def test_blob_store_removes_leftovers_and_fresh_folder_starts_empty(tmp_path):
    blobs = BlobStore(tmp_path)
    name = blobs.store(b"stored")
    leftover = blobs.path(name).with_name("x.new")
    leftover.write_bytes(b"half")
    assert BlobStore(tmp_path).has(name) and not leftover.exists()
    assert not BlobStore(tmp_path, fresh=True).has(name)


def test_empty_blob_always_exists_without_a_file(tmp_path):
    blobs = BlobStore(tmp_path)
    assert blobs.store(b"") == EMPTY_DIGEST and blobs.has(EMPTY_DIGEST)
    assert (blobs.size(EMPTY_DIGEST), blobs.read(EMPTY_DIGEST)) == (0, b"")
    assert blobs.read_verified(EMPTY_DIGEST) == b"" and not list(tmp_path.rglob("*"))
    blobs.delete(EMPTY_DIGEST)
    assert blobs.remove_unless_pinned(EMPTY_DIGEST) and blobs.has(EMPTY_DIGEST)


def test_partial_blobs_are_removed_after_their_maximum_age(tmp_path):
    blobs = BlobStore(tmp_path)
    fresh, old = (blake3(data).hexdigest() for data in (b"fresh", b"old"))
    for name in (fresh, old):
        assert blobs.append_piece(name, 0, b"x", 10) is AppendResult.INCOMPLETE
    os.utime(tmp_path / old[:2] / f"{old}.part", (1, 1))
    again = BlobStore(tmp_path)
    assert (again.partial_size(fresh), again.partial_size(old)) == (1, 0)


PIECES = st.lists(
    st.tuples(
        st.integers(0, 60), st.integers(0, 60), st.sampled_from(["true", "false", "restart"])
    ),
    max_size=30,
)


@settings(max_examples=examples(150, 2000), deadline=None)
@given(st.binary(min_size=1, max_size=60), PIECES)
@example(b"\0\0", [(0, 1, "false")])
def test_blob_is_complete_only_with_its_bytes_in_whatever_pieces(data, pieces):
    """Let pieces repeat, overlap, leave gaps, be cut, go past the end, or contain false bytes."""
    name, here, total = blake3(data).hexdigest(), b"", len(data)
    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(Path(folder))
        for offset, size, kind in pieces:
            piece = (data + b"too much")[offset : offset + size]
            if kind == "false":
                piece = bytes(byte ^ 1 for byte in piece)
            if kind == "restart":
                blobs = BlobStore(Path(folder))
            if offset <= len(here) < offset + len(piece) and here != data:
                here += piece[len(here) - offset :]
            expected = AppendResult.INCOMPLETE
            if here == data:
                expected = AppendResult.COMPLETE
            elif len(here) >= total:
                expected, here = AppendResult.CORRUPT, b""
            assert blobs.append_piece(name, offset, piece, total) is expected
            is_complete = here == data
            assert blobs.has(name) == is_complete
            assert blobs.read_verified(name) == (data if is_complete else None)
            assert blobs.size(name) == (total if is_complete else None)
            partial = 0 if is_complete else len(here)
            assert blobs.partial_size(name) == blobs.partial_bytes() == partial
        result = blobs.append_piece(name, len(here), data[len(here) :], total)
        if result is AppendResult.CORRUPT:  # false bytes lay there until it was complete
            blobs.append_piece(name, 0, data, total)
        files = [path.name for path in Path(folder).rglob("*") if path.is_file()]
        assert blobs.read_verified(name) == data and files == [name]
        assert blobs.read(name, 1, 2) == data[1:3]


@settings(max_examples=examples(100, 1000), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "pin", "unpin", "remove", "begin", "discard", "delete"]),
            st.sampled_from([b"one", b"two"]),
        ),
        max_size=30,
    )
)
def test_pinned_blobs_stay_until_they_are_unpinned_as_often(steps):
    pins, stored, begun = dict.fromkeys((b"one", b"two"), 0), set(), set()
    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(Path(folder))
        for step, data in steps:
            name = blake3(data).hexdigest()
            match step:
                case "store":
                    assert blobs.store(data, pin=True) == name
                    stored.add(data)
                    pins[data] += 1
                case "pin":
                    blobs.pin([name])
                    pins[data] += 1
                case "unpin":
                    blobs.unpin([name])
                    pins[data] = max(0, pins[data] - 1)
                case "remove":
                    assert blobs.remove_unless_pinned(name) == (not pins[data])
                    stored -= set() if pins[data] else {data}
                case "begin":
                    blobs.append_piece(name, 0, data[:1], len(data))
                    begun |= {data} - stored
                case "discard":
                    blobs.discard_partial(name)
                    begun.discard(data)
                case "delete":
                    blobs.delete(name)
                    stored.discard(data)
                    begun.discard(data)
            assert blobs.has(name) == (data in stored)
            assert bool(blobs.partial_size(name)) == (data in begun)


@pytest.mark.parametrize(
    ("append", "function", "partial_size"),
    [
        (append_in_two_pieces, "move_into_place", len(DATA)),
        (lambda blobs: blobs.store(DATA), "write_into_place", 0),
    ],
)
def test_crash_before_a_blob_has_its_name_leaves_it_to_be_finished(
    tmp_path, monkeypatch, append, function, partial_size
):
    def crash(temporary: str, *arguments: object) -> None:
        if not Path(temporary).exists():
            Path(temporary).write_bytes(DATA[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(blob_store, function, crash)
        with pytest.raises(KeyboardInterrupt):
            append(BlobStore(tmp_path))
    blobs = BlobStore(tmp_path)  # of the next process
    assert not blobs.has(NAME) and blobs.partial_size(NAME) == partial_size
    assert not list(tmp_path.glob("*/*.new"))
    rest = DATA[partial_size:]
    assert blobs.append_piece(NAME, partial_size, rest, len(DATA)) is AppendResult.COMPLETE
    assert blobs.read_verified(NAME) == DATA
