"""Folders that earlier versions wrote open in this one: ledgers, and training states of each kind.

`saved/DATE.zip` was written by the version of that day: two machines' ledgers (one from the run's
start, one that joined from a snapshot) after rounds, a verdict and a retraction, the state of an
engine after three steps and a round, and what the version itself read from them.
"""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from barnraise.exchange.snapshots.snapshot_client import load_base_snapshot
from barnraise.ledger.anchor import Anchor, digest_fragments
from barnraise.ledger.ledger import Ledger
from barnraise.planning.plan import Plan, tile_elements
from barnraise.spec import ModelSpec, Recipe
from barnraise.swap.engine import Engine
from barnraise.swap.state_store import FragmentSequence
from barnraise.training.resume import DiskState, SavedState

SAVED = sorted((Path(__file__).parent / "saved").glob("*.zip"))
MODEL = ModelSpec(layers=3, width=8, heads=1, context=8, vocabulary=16)
GROUPS = ((1,), (2,), (3,))
MEMORY = Plan(
    MODEL,
    forward_groups=GROUPS,
    backward_groups=GROUPS[::-1],
    weights=("host",) * 5,
    moments=("host",) * 5,
    gradient_slots=2,
    tile=tile_elements(MODEL, whole=True),
)
EXACT = replace(
    MEMORY,
    weights=("host", "disk", "disk", "disk", "host"),
    moments=("disk",) * 5,
    exchange="disk",
    crash_safety="exact",
    slots=3,
    gradients="disk",
    tile=1024,
    gradient_slots=4,
    ring=3,
)
PLANS = {"memory": MEMORY, "exact": EXACT, "restart": replace(EXACT, crash_safety="restart")}


@pytest.fixture(params=SAVED, ids=lambda path: path.stem)
def saved(request, tmp_path) -> tuple[Path, dict]:
    """Unpack a version's folders; return where they are, and what that version read from them."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    return tmp_path, json.loads((tmp_path / "manifest.json").read_text())


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digest of each tensor's bytes."""
    return {name: blake3(tensors[name].numpy().tobytes()).hexdigest() for name in tensors}


@pytest.mark.parametrize("name", ["full", "joined"])
def test_ledger_of_an_earlier_version_has_the_same_updates(saved, name):
    folder, manifests = saved
    expected = manifests[name]
    ledger = Ledger(folder / name)
    try:
        assert ledger.vector() == expected["vector"] and ledger.tokens == expected["tokens"]
        assert ledger.heads_digest == expected["heads"]
        assert ledger.verdicts.digest == expected["verdicts"]
        assert len(ledger.peer_store.peers()) == expected["peers"]
        assert all(ledger.tickets.get(ticket) for ticket in expected["tickets"])
        base = load_base_snapshot(ledger)
        assert (base is not None) == expected["base"]
    finally:
        ledger.close()


@pytest.mark.parametrize(("name", "number"), [("full", 1), ("joined", 4)])
def test_machine_with_an_earlier_ledger_reaches_the_same_anchor(saved, world, name, number):
    folder, manifests = saved
    world.folder = folder
    machine = world.machine(number, name)
    base = load_base_snapshot(machine.ledger)
    if base is not None:
        machine.anchor.load(base.fragments, base.heads, base.retracted)
    machine.start()
    assert digest_fragments(machine.anchor.fragments) == manifests[name]["anchor"]


@pytest.mark.parametrize("kind", PLANS)
def test_engine_resumes_an_earlier_state_to_the_bit(saved, kind):
    folder, manifests = saved
    plan = PLANS[kind]
    path = folder / "state" / kind
    state = SavedState(path, plan)
    assert state.header is not None and state.header.step == 7
    if plan.on_disk:
        assert digests_of(DiskState(MODEL, path / "state")) == manifests[f"state {kind}"]
    store = state.open_store(Recipe())
    progress = state.read_progress(store)
    anchor = Anchor(FragmentSequence(store, "anchor"))
    engine = Engine(plan, Recipe(), store, anchor, lambda progress: "{}", progress)
    try:
        if progress is None:
            state.load_into(engine)
            assert digests_of(engine.state_dict()) == manifests[f"state {kind}"]
        text = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(9))
        assert engine.step([text], position=8).loss > 0
    finally:
        engine.close()
