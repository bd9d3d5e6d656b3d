"""A saved state moves to the tier of a new plan without loss."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.updates.headers import build_update
from memory_anchor import MemoryAnchor

from barnraise.errors import StateError
from barnraise.ledger.anchor import Anchor, fragment_to_bytes
from barnraise.ledger.ledger import Ledger
from barnraise.planning.plan import Plan, tile_elements
from barnraise.protocol.signing import Identity
from barnraise.spec import ADAMW, MUON, ModelSpec, Recipe
from barnraise.swap.engine import Engine
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.training.checkpoint import StateHeader
from barnraise.training.resume import (
    CREW_LABEL,
    AnchorOverlay,
    DiskState,
    SavedState,
    progress_fields,
    read_state_header,
)

MODEL = ModelSpec(layers=3, width=32, heads=4, context=16, vocabulary=300)
GROUPS = ((1,), (2,), (3,))
HOST, DISK = ("host",) * 5, ("disk",) * 5
MEMORY = Plan(
    MODEL,
    forward_groups=GROUPS,
    backward_groups=GROUPS[::-1],
    weights=HOST,
    moments=HOST,
    gradient_slots=2,
    tile=tile_elements(MODEL, whole=True),
)
EXACT = replace(
    MEMORY,
    weights=("host", *DISK[:3], "host"),
    moments=DISK,
    exchange="disk",
    crash_safety="exact",
    slots=3,
    gradients="disk",
    tile=4096,
    gradient_slots=4,
    ring=3,
)
RESTART = replace(EXACT, crash_safety="restart")
PLANS = {"memory": MEMORY, "exact": EXACT, "restart": RESTART}
HEADER = StateHeader(
    run="01890000-0000-7000-8000-000000000000", spec="f" * 64, step=7, last_seq=2, tokens=99
)


def open_engine(folder: Path, plan: Plan) -> tuple[SavedState, Engine]:
    """Open an engine on the saved state of a folder, or on the seed's weights."""
    saved = SavedState(folder, plan)
    recipe = Recipe(optimizer=plan.optimizer)
    store = saved.open_store(recipe)
    anchor = Anchor(FragmentSequence(store, "anchor"))
    fresh = saved.header is None
    if fresh:
        anchor.load(MemoryAnchor.from_seed(MODEL, 5).fragments, {})
    progress = saved.read_progress(store)

    def describe(progress) -> str:
        fields = {"step": progress.position, "progress": progress_fields(progress)}
        return HEADER.model_copy(update=fields).model_dump_json()

    engine = Engine(plan, recipe, store, anchor, describe, progress)
    if not fresh and progress is None:
        saved.load_into(engine)
        engine.progress = replace(engine.progress, position=saved.header.step)
    return saved, engine


def close_and_read_state(
    folder: Path, plan: Plan, saved: SavedState, engine: Engine
) -> dict[str, torch.Tensor]:
    """Save, close the engine, and return all tensors of its state."""
    saved.save(engine, HEADER, closing=True)
    if not plan.on_disk:
        tensors = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        engine.close()
        return tensors
    engine.close()
    state = DiskState(MODEL, folder / "state")
    tensors = {name: state[name].clone() for name in state}
    state.close()
    return tensors


@pytest.mark.integration
@pytest.mark.parametrize(
    "change", ["memory exact", "exact memory", "exact restart", "restart exact", "restart memory"]
)
@pytest.mark.parametrize(
    ("has_momentum", "optimizer"), [(True, ADAMW), (False, ADAMW), (True, MUON)]
)
def test_change_of_limits_loses_nothing(tmp_path, change, has_momentum, optimizer):
    first, second = (replace(PLANS[name], optimizer=optimizer) for name in change.split())
    saved, engine = open_engine(tmp_path, first)
    for step in range(3):
        text = torch.randint(300, (2, 17), generator=torch.Generator().manual_seed(step))
        engine.step([text], position=step + 5)
    list(engine.end_round(lambda values: (b"", values // 2), 1.0, has_momentum=has_momentum))
    before = close_and_read_state(tmp_path, first, saved, engine)
    assert any(bool(before[f"m.{i}"].any()) for i in range(5))
    assert all(bool(before[f"momentum.{i}"].any()) == has_momentum for i in range(5)), (
        "momentum that only serves predictions does not outlast the move"
    )
    saved, engine = open_engine(tmp_path, second)
    assert saved.header.step == engine.progress.position == 7
    assert engine.progress.optimizer_steps == 3
    after = close_and_read_state(tmp_path, second, saved, engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "checkpoint").exists() != (tmp_path / "state").exists()


@pytest.mark.parametrize("place", PLANS)
@pytest.mark.parametrize(("saved", "ours"), [(ADAMW, MUON), (MUON, ADAMW)])
def test_state_of_another_optimizer_is_refused_before_memory_is_taken(
    place, saved, ours, tmp_path, monkeypatch
):
    plan = replace(PLANS[place], optimizer=saved)
    close_and_read_state(tmp_path, plan, *open_engine(tmp_path, plan))
    monkeypatch.setattr(StateStore, "_allocate_memory", lambda store: pytest.fail("allocates"))
    with pytest.raises(StateError, match=f"is of the optimizer {saved}.*trains with {ours}: rem"):
        open_engine(tmp_path, replace(plan, optimizer=ours))


def test_interrupted_move_is_undone_or_completed(tmp_path):
    close_and_read_state(tmp_path, EXACT, *open_engine(tmp_path, EXACT))
    (tmp_path / "state").rename(tmp_path / "state.new")
    (tmp_path / "state.old").mkdir()
    assert SavedState(tmp_path, EXACT).header is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state"]
    (tmp_path / "state").rename(tmp_path / "state.old")
    (tmp_path / "state.new").mkdir()
    assert SavedState(tmp_path, EXACT).header is not None and sorted(
        p.name for p in tmp_path.iterdir()
    ) == ["state"]


def test_state_with_a_damaged_anchor_is_not_used(tmp_path, caplog):
    close_and_read_state(tmp_path, EXACT, *open_engine(tmp_path, EXACT))
    store = StateStore(EXACT, tmp_path / "state")
    store.mark_invalid("anchor")
    store.close()
    assert read_state_header(tmp_path / "state") is None and "anchor" in caplog.text
    saved = SavedState(tmp_path, EXACT)
    saved.clear()
    assert saved.header is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_state_older_than_its_ledger_keeps_all_but_its_anchor(tmp_path, plan):
    saved, engine = open_engine(tmp_path, plan)
    engine.step([torch.randint(0, 300, (1, 17))])
    before = close_and_read_state(tmp_path, plan, saved, engine)
    ledger = Ledger(tmp_path / "ledger")
    saved = SavedState(tmp_path, plan)
    assert saved.align_with_ledger(ledger, Recipe()), "an empty ledger cannot be newer"
    author = Identity(b"a" * 32)
    update = build_update(author.key, 5, run=HEADER.run)
    head = author.sign("update", update)
    anchor = [
        torch.full((fragment.size,), 7 + fragment.index, dtype=torch.int32)
        for fragment in MODEL.fragments()
    ]
    digests = [ledger.blobs.store(fragment_to_bytes(units)) for units in anchor]
    ledger.rebase([(head, update)], digests)
    assert saved.align_with_ledger(ledger, Recipe())
    assert saved.header.heads == {update.author: update} and saved.header.tokens == 50
    assert saved.header.last_seq == HEADER.last_seq
    again = SavedState(tmp_path, plan)
    assert again.header.heads == {update.author: update}
    assert again.align_with_ledger(ledger, Recipe())
    saved, engine = open_engine(tmp_path, plan)
    after = close_and_read_state(tmp_path, plan, saved, engine)
    for name, tensor in before.items():
        kind, _, index = name.partition(".")
        assert torch.equal(after[name], anchor[int(index)] if kind == "anchor" else tensor), name
    ledger.close()


def test_label_of_a_crew_tells_that_the_others_have_an_older_anchor():
    state = {CREW_LABEL: torch.tensor([3]), "anchor.0": torch.zeros(2), "m.0": torch.ones(2)}
    overlay = AnchorOverlay(state, [torch.full((2,), 7)])
    assert overlay[CREW_LABEL].tolist() == [-3]
    assert overlay["anchor.0"].tolist() == [7, 7] and overlay["m.0"].tolist() == [1, 1]
