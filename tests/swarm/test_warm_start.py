"""Begin a run with another run's final weights; other machines fetch them by digest."""

import threading
from dataclasses import replace

import pytest

from barnraise.errors import StateError
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.spec import RunSpec, Start, problems
from barnraise.state_dir import StateDir
from barnraise.training.prefetch import fetch_start_weights
from barnraise.training.warm_start import fetch_initial_weights


@pytest.fixture
def ended_run(swarm):
    """Train a run to its end with one worker, Ada."""
    run = swarm(token_budget=30_000, folder="before")
    ada = run.start("ada")
    ada.join()
    return run, ada


def start_of(run, ada) -> Start:
    return Start(
        run=run.manifest.run, digest=ada.status["anchor"], tokens=ada.status["ledger_tokens"]
    )


def test_warm_started_run_continues_identically_on_every_machine(ended_run, swarm, caplog):
    before, ada = ended_run
    after = swarm(token_budget=60_000, folder="after")
    home = after.home("ada")
    blobs = BlobStore(home.path / "runs" / before.manifest.run / "blobs")
    spec = replace(after.spec, start=start_of(before, ada))
    initial = fetch_initial_weights(
        StateDir(before.folder / "ada"), threading.Event(), lambda: None, spec, blobs.store
    )
    assert len(initial.fragments) == spec.model.layers + 2 and initial.tokenizer is None
    after.spec = replace(spec, start=replace(spec.start, fragments=tuple(initial.fragments)))
    assert not problems(after.spec) and RunSpec.from_json(after.spec.to_json()) == after.spec

    ben = after.start("ben", knows=["ada"])  # starts before the one machine that has the weights
    after.until(lambda: "the weights this run begins with from peers: 4 of 4" in caplog.text)
    heirs = [after.start("ada", knows=["ben"]), ben]
    for heir in heirs:
        heir.join(120)
    ended_at = ada.status["validation_last"][1]
    # One of them may start with the other's first updates.
    firsts = [heir.status["validation_first"] for heir in heirs]
    assert (0, ended_at) in firsts, "the same weights bit for bit"
    assert max(loss for _, loss in firsts) < ended_at + 0.5
    assert len({(heir.status["vector"], heir.status["anchor"]) for heir in heirs}) == 1
    assert heirs[0].status["validation_last"][1] < ended_at
    assert all(heir.status["checksum"]["corruptions"] == 0 for heir in heirs), (
        "the anchor is compared with its own initial weights"
    )


def test_machine_without_the_start_weights_says_why(ended_run, tmp_path):
    before, ada = ended_run
    wrong = replace(before.spec, start=replace(start_of(before, ada), digest="0" * 64))
    for home in (StateDir(before.folder / "ada"), StateDir(tmp_path / "new")):
        # The weights are not on this machine, and fetching them requires an enrolment.
        with pytest.raises(StateError, match="not enrolled"):
            fetch_initial_weights(
                home, threading.Event(), lambda: None, wrong, lambda data: "0" * 64
            )


def test_wrong_start_fragments_are_refused_before_the_first_step(ended_run, tmp_path):
    before, ada = ended_run
    blobs = BlobStore(tmp_path / "blobs")
    spec = replace(before.spec, start=start_of(before, ada))
    initial = fetch_initial_weights(
        StateDir(before.folder / "ada"), threading.Event(), lambda: None, spec, blobs.store
    )
    other = blobs.store(bytes(blobs.size(initial.fragments[0])))
    for fragments, reason in (
        ([other, *initial.fragments[1:]], "tell its owner"),
        ([initial.fragments[-1], *initial.fragments[1:]], "is of another model"),
    ):
        wrong = replace(spec, start=replace(spec.start, fragments=tuple(fragments)))
        with pytest.raises(StateError, match=reason):
            fetch_start_weights(None, blobs, wrong, lambda: False)
    right = replace(spec, start=replace(spec.start, fragments=tuple(initial.fragments)))
    assert fetch_start_weights(None, blobs, right, lambda: False)


@pytest.mark.parametrize(
    "start",
    [
        {"run": ""},
        {"run": "nonsense"},
        {"digest": "0"},
        {"tokens": -1},
        {"fragments": ("0" * 64,)},
        {"tokenizer": "1" * 64},
    ],
)
def test_inconsistent_start_is_refused(swarm, start):
    run = swarm()
    valid = Start(run=run.manifest.run, digest="1" * 64, tokens=5, fragments=("2" * 64,) * 4)
    assert not problems(replace(run.spec, start=valid))
    assert "start" in problems(replace(run.spec, start=replace(valid, **start)))
