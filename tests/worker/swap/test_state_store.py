"""Tests of a state on its tiers: round trips, and recovery from a crash at any instant."""

import itertools
import os
import random
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.effort import examples
from helpers.python_code import start_python
from helpers.worker.plans import bitwise, engine_of, sample_text, state_digest, tiny_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.errors import DamageError, StateError
from barnraise.planning.plan import PAGE, STATE_KINDS
from barnraise.spec import MUON, ModelSpec
from barnraise.swap.arena import page_aligned
from barnraise.swap.state_store import (
    EXCHANGE_KINDS,
    MANIFEST_FILE,
    STATE_FILE,
    TRAINING_KINDS,
    FragmentSequence,
    StateStore,
)

MODEL = ModelSpec(layers=2, width=16, heads=1, context=8, vocabulary=256)


def small_plan(kind: str, **more):
    return tiny_plan(kind, MODEL, **{"tile": 2048, **more})


def record(store: StateStore, kind: str, i: int, t: int, value: int) -> torch.Tensor:
    """Return a record of random bytes, seeded by `value`."""
    data = page_aligned(store.plan.tile_record_bytes(kind, i)[t])
    return data.random_(0, 256, generator=torch.Generator().manual_seed(value))


def test_records_lie_on_whole_pages_of_their_own(tmp_path):
    """Direct I/O needs whole pages, and a torn write must not damage another record."""
    for kind, width in (("exact", 32), ("restart", 8)):
        store = StateStore(small_plan(kind, moments_bits=width), tmp_path / kind)
        spans = []
        for offset, size in store.record_extents().values():
            assert offset % PAGE == size % PAGE == 0
            spans.append((offset, offset + size))
        spans.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        assert (
            spans[-1][1] == store.plan.file_bytes() == (tmp_path / kind / STATE_FILE).stat().st_size
        )
        store.close()


def record_places(store: StateStore) -> list[tuple[str, int, int]]:
    plan = store.plan
    return [
        (kind, i, t)
        for kind in STATE_KINDS
        for i in range(plan.last_fragment + 1)
        for t in range(plan.tile_count(i))
    ]


def read_content(store: StateStore) -> dict[tuple, bytes]:
    """Read all records."""
    records = {}
    for place in record_places(store):
        kind, i, t = place
        into = page_aligned(store.plan.tile_record_bytes(kind, i)[t])
        store.read(*place, into)
        records[place] = into.numpy().tobytes()
    return records


WRITES = st.lists(st.one_of(st.integers(0, 1 << 20), st.just("commit")), max_size=30)


@settings(max_examples=25, deadline=None)
@given(writes=WRITES, kind=st.sampled_from(["exact", "restart"]))
def test_read_returns_the_last_write_before_and_after_a_commit(writes, kind):
    with tempfile.TemporaryDirectory() as folder:
        store = StateStore(small_plan(kind), Path(folder))
        expected = read_content(store)
        assert not any(map(any, expected.values())), "zeros before the first write"
        all_places = record_places(store)
        for number, write in enumerate(writes):
            if write == "commit":
                store.commit(str(number))
                continue
            place = all_places[write % len(all_places)]
            data = record(store, *place, value=write)
            store.write(*place, data)
            expected[place] = data.numpy().tobytes()
        assert read_content(store) == expected
        store.commit("last")
        store.close()
        again = StateStore(small_plan(kind), Path(folder))
        assert (
            read_content(again) == expected and again.header == "last" and not again.invalid_kinds
        )
        again.close()


@settings(max_examples=25, deadline=None)
@given(writes=WRITES)
def test_exact_crash_after_any_write_leaves_the_last_commit_intact(writes):
    with tempfile.TemporaryDirectory() as folder:
        store = StateStore(small_plan("exact"), Path(folder))
        store.commit("first")
        committed, header = read_content(store), "first"
        all_places = record_places(store)
        for number, write in enumerate(writes):
            if write == "commit":
                header = str(number)
                store.commit(header)
                committed = read_content(store)
            else:
                place = all_places[write % len(all_places)]
                store.write(*place, record(store, *place, value=write))
        store.close()  # without a commit
        again = StateStore(small_plan("exact"), Path(folder))
        assert (
            again.header == header and not again.invalid_kinds and read_content(again) == committed
        )
        again.close()


@settings(max_examples=25, deadline=None)
@given(writes=WRITES)
def test_restart_crash_after_any_write_marks_kinds_invalid(writes):
    with tempfile.TemporaryDirectory() as folder:
        store = StateStore(small_plan("restart"), Path(folder))
        store.commit("first")
        committed, invalid = read_content(store), set()
        all_places = record_places(store)
        for number, write in enumerate(writes):
            if write == "commit":
                store.commit(str(number))
                committed, invalid = read_content(store), set()
            else:
                place = all_places[write % len(all_places)]
                store.write(*place, record(store, *place, value=write))
                for group in (TRAINING_KINDS, EXCHANGE_KINDS):
                    if place[0] in group:
                        invalid |= set(group)
        store.close()
        again = StateStore(small_plan("restart"), Path(folder))
        assert again.invalid_kinds == invalid
        for place, data in read_content(again).items():
            assert data == (bytes(len(data)) if place[0] in invalid else committed[place])
        again.close()


@pytest.mark.parametrize("kind", ["exact", "restart"])
def test_closing_commit_restores_what_memory_held(kind, tmp_path):
    plan = small_plan(
        kind, weights=("host",) * 4, moments=("host", "disk", "host", "host"), exchange="host"
    )
    engine = engine_of(plan, tmp_path)
    engine.step([sample_text(model=MODEL)], position=3)
    before = state_digest(engine)
    engine.commit(closing=True)
    engine.close()
    again = engine_of(plan, tmp_path)
    assert state_digest(again) == before and again.progress.position == 3
    again.close()


@pytest.mark.parametrize("kind", ["exact", "restart"])
def test_state_survives_a_change_of_tiers(kind, tmp_path):
    less = small_plan(kind)
    more = replace(
        less,
        weights=("host",) * 4,
        moments=("host",) * 4,
        exchange="host",
        gradients="host",
        ring=0,
    )
    digests, expected = [], engine_of(tiny_plan("resident", MODEL))
    for step, plan in enumerate((less, more, less)):
        engine = engine_of(plan, tmp_path)
        engine.step([sample_text(seed=step, model=MODEL)])
        expected.step([sample_text(seed=step, model=MODEL)])
        digests.append(state_digest(engine) == state_digest(expected))
        engine.commit(closing=True)
        engine.close()
    assert digests == [True] * 3


def test_state_with_another_layout_is_refused_with_advice(tmp_path):
    StateStore(small_plan("exact"), tmp_path).commit("one")
    for other in (
        small_plan("restart"),
        small_plan("exact", tile=4096),
        small_plan("exact", moments_bits=8),
        small_plan("exact", optimizer=MUON),
    ):
        with pytest.raises(
            StateError, match=r"with another layout; give the limits it was created with, or remove"
        ):
            StateStore(other, tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"digest": "0", "body": "{}"}', '{"digest": 1}', "null"]
)
def test_torn_manifest_is_refused(text, tmp_path):
    StateStore(small_plan("exact"), tmp_path).commit("one")
    intact = (tmp_path / MANIFEST_FILE).read_text()
    (tmp_path / MANIFEST_FILE).write_text(text)
    with pytest.raises(StateError, match=r"manifest.json is damaged.*remove"):
        StateStore(small_plan("exact"), tmp_path)
    (tmp_path / MANIFEST_FILE).write_text(intact)
    assert StateStore(small_plan("exact"), tmp_path).header == "one"


@pytest.mark.parametrize("cut", [1, 100, -1])
def test_unfinished_manifest_is_ignored(cut, tmp_path):
    StateStore(small_plan("exact"), tmp_path).commit("one")
    (tmp_path / (MANIFEST_FILE + ".new")).write_text((tmp_path / MANIFEST_FILE).read_text()[:cut])
    assert StateStore(small_plan("exact"), tmp_path).header == "one"


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_altered_byte_is_named_and_reopening_recovers(kind, tmp_path):
    plan = small_plan("exact")
    engine = engine_of(plan, tmp_path)
    for step in range(2):
        engine.step([sample_text(seed=step, model=MODEL)])
    list(engine.end_round(lambda values: (b"", values // 2), 1.0))
    engine.commit()
    store, place = engine.store, (kind, 1, 1)
    at = store.newest_offset(*place) + 17
    engine.close()
    with (tmp_path / STATE_FILE).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    store = StateStore(plan, tmp_path)
    with pytest.raises(DamageError, match=rf"the {kind} of block.0 are not what was written there"):
        read_content(store)
    store.close()
    again = StateStore(plan, tmp_path)
    assert kind in again.invalid_kinds
    assert all(
        not any(data)
        for place, data in read_content(again).items()
        if place[0] in again.invalid_kinds
    )
    if kind == "anchor":
        assert again.invalid_kinds == set(STATE_KINDS), (
            "nothing is left to restart from: the machine needs its peers"
        )
    again.close()
    if kind != "anchor":
        engine = engine_of(plan, tmp_path)
        assert engine.store.invalid_kinds == set(), "invalid kinds have been restarted"
        stats = engine.step([sample_text(model=MODEL)])
        assert not stats.abandoned
        if kind in TRAINING_KINDS:
            assert engine.progress_with_pending.warmup_steps_left > 0
            assert engine.progress_with_pending.optimizer_steps == 1
        engine.close()


def test_fragment_sequence_is_equal_in_memory_and_on_disk(tmp_path):
    in_memory = StateStore(small_plan("resident", tile=1 << 13))
    on_disk = StateStore(small_plan("exact"), tmp_path)
    sequences = [FragmentSequence(store, "anchor") for store in (in_memory, on_disk)]
    for fragment in MODEL.fragments():
        units = bitwise.initial_units(fragment)
        for sequence in sequences:
            sequence[fragment.index] = units
            assert torch.equal(sequence[fragment.index], units)
    assert all(torch.equal(a, b) for a, b in zip(*sequences, strict=True))
    assert len(sequences[1]) == 4
    sequences[0][1].add_(1)
    sequences[1][1].add_(1)
    assert not torch.equal(sequences[0][1], sequences[1][1]), (
        "memory returns a reference, and disk a copy"
    )


def test_bytes_written_today_reduce_what_is_left(tmp_path):
    plan = replace(small_plan("exact"), written_per_step=10**6)
    store = StateStore(plan, tmp_path)
    assert store.may_write_step(), "there is no limit"
    store.plan = replace(plan, daily_write_limit=10**6)
    assert store.may_write_step()
    data = record(store, "moments", 1, 0, 1)
    store.write("moments", 1, 0, data)
    assert not store.may_write_step()
    store.plan = replace(plan, daily_write_limit=10**6 + data.numel())
    assert store.may_write_step()
    store.commit("one")
    store.close()
    again = StateStore(small_plan("exact"), tmp_path)
    assert again.written_today == data.numel()
    again.close()


# ---- kill -9 -------------------------------------------------------------------------------------

CHILD = """
from pathlib import Path
import torch
torch.set_num_threads(1)
from helpers.worker.plans import engine_of, sample_text
from test_state_store import MODEL, small_plan
engine = engine_of(small_plan({kind!r}, **{more}), Path({folder!r}))
print("ready", flush=True)
while True:
    position = engine.progress_with_pending.position
    engine.step([sample_text(seed=position, model=MODEL)], position=position + 1)
    print(position, flush=True)
"""


def train_and_kill(kind: str, folder: Path, steps: int, more: dict, dice: random.Random) -> None:
    """Let a child train in the folder, and kill it at some instant after `steps` steps."""
    program = CHILD.format(kind=kind, more=more, folder=str(folder))
    child = start_python(program, folders=[Path(__file__).parent])
    assert child.stdout.readline() == "ready\n"
    started_at = time.monotonic()
    for _ in range(steps):
        assert child.stdout.readline()
    time.sleep(dice.random() * (time.monotonic() - started_at) / steps)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()


def undisturbed_digest(steps: int, optimizer: str) -> str:
    engine = engine_of(tiny_plan("resident", MODEL, optimizer=optimizer))
    for step in range(steps):
        engine.step([sample_text(seed=step, model=MODEL)], position=step + 1)
    return state_digest(engine)


PLACES = ({}, {"weights": ("host",) * 4}, {"staged": True}, {"optimizer": MUON})


@pytest.mark.slow  # tests/swarm/test_disk.py kills such a worker too
@pytest.mark.parametrize("more", PLACES, ids=str)
def test_exact_run_killed_repeatedly_has_the_undisturbed_bits(more, tmp_path):
    dice, reached = random.Random(5), 0
    for _ in range(examples(2, exhaustive=3)):
        train_and_kill("exact", tmp_path, 3, more, dice)
        engine = engine_of(small_plan("exact", **more), tmp_path)
        # Of three steps the last one's update is pending, and a busy disk may not have the second.
        assert engine.store.invalid_kinds == set() and engine.progress.position >= reached + 1
        reached = engine.progress.position
        assert state_digest(engine) == undisturbed_digest(reached, engine.plan.optimizer)
        engine.close()


def test_restart_killed_run_begins_at_the_anchor_and_warms_up(tmp_path):
    dice = random.Random(6)
    for _ in range(2):
        train_and_kill("restart", tmp_path, 2, {}, dice)
        engine = engine_of(small_plan("restart"), tmp_path)
        fresh = engine_of(tiny_plan("resident", MODEL))
        for recovered, initial in zip(
            bitwise.read_state(engine), bitwise.read_state(fresh), strict=True
        ):
            assert torch.equal(recovered, initial)
        assert engine.progress.warmup_steps_left > 0 and engine.progress.optimizer_steps == 0
        engine.close()
