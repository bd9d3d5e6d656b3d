"""A crew's machine finds its part of the state again, and nothing that belongs to another one."""

import pytest
import torch
from helpers.worker.crews import RUN
from helpers.worker.plans import bitwise, stage_of

from barnraise.ledger.anchor import fragment_from_bytes
from barnraise.swap.state_store import FragmentSequence
from barnraise.training.crew.crew_member import NoLedger
from barnraise.training.crew.crew_state import CrewState
from barnraise.training.crew.stage_engine import StageEngine, read_part

PLAN = bitwise.Case(2, "disk exact", "exact", 127, 127).plan()
MEMORY_PLAN = bitwise.resident_plan(bitwise.MODEL, 2)
LABEL = 7


def state_in(folder) -> CrewState:
    return CrewState(folder, RUN, "0" * 64)


def save_part(plan, folder) -> None:
    """Save a part whose anchor has only units of 3."""
    state = state_in(folder)
    store, progress = state.open_store(plan)
    engine = StageEngine(plan, bitwise.RECIPE, store, NoLedger(), state.describe, progress)
    state.load(engine, 0)
    for i in plan.local_fragments:
        engine.replace_fragment(i, torch.full((engine.fragments[i].size,), 3, dtype=torch.int32))
    state.save(engine, LABEL, closing=True)
    engine.close()


def test_part_on_disk_is_found_again_with_all_of_its_progress(tmp_path):
    plan = stage_of(PLAN, (2, 3))
    save_part(plan, tmp_path)
    store, progress = state_in(tmp_path).open_store(plan)
    assert progress.label == LABEL and len(progress.prediction) == len(plan.fragments)
    assert all((FragmentSequence(store, "anchor")[i] == 3).all() for i in (2, 3))
    store.close()


@pytest.mark.parametrize("plan", [PLAN, MEMORY_PLAN], ids=["disk", "memory"])
def test_part_of_another_span_is_loaded_as_far_as_it_is_held(plan, tmp_path):
    save_part(stage_of(PLAN, (2, 3)), tmp_path)
    state, plan = state_in(tmp_path), stage_of(plan, (3, 4))
    store, progress = state.open_store(plan)
    assert store.header is None and progress is None
    engine = StageEngine(plan, bitwise.RECIPE, store, NoLedger(), state.describe, progress)
    assert state.load(engine, LABEL + 1) == []
    assert state.load(engine, LABEL) == [2, 3]
    assert (engine.anchors[3] == 3).all() and (engine.anchors[4] == 0).all()
    assert (fragment_from_bytes(read_part(state.saved, 2, "anchor")) == 3).all()
    state.save(engine, LABEL + 1, closing=True)
    assert not (tmp_path / "former").exists()
    engine.close()


def test_labels_of_a_lost_state_are_forgotten(tmp_path):
    plan = stage_of(MEMORY_PLAN, (2, 3))
    save_part(plan, tmp_path)
    state = state_in(tmp_path)
    store, progress = state.open_store(plan)
    engine = StageEngine(plan, bitwise.RECIPE, store, NoLedger(), state.describe, progress)
    assert state.load(engine, LABEL)
    assert state.load(engine, 0) == [] and state.load(engine, LABEL) == []
    engine.close()
