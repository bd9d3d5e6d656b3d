"""Begin a run with another run's final weights; other machines fetch them by digest."""

import threading
from dataclasses import replace

import pytest
import torch
from helpers.worker.trained_models import BPE, bpe_file, compute_logits, make_trained_model

from barnraise.errors import StateError, UnsupportedModelError
from barnraise.ledger.anchor import digest_fragments, fragment_from_bytes
from barnraise.ledger.blob_store import BlobStore
from barnraise.planning.memory_model import HELD_OUT
from barnraise.spec import RunSpec, Start, problems
from barnraise.state_dir import StateDir
from barnraise.training import prefetch
from barnraise.training.local_control import LocalControl
from barnraise.training.model_files.hugging_face_export import export_hugging_face
from barnraise.training.prefetch import check_start_weights
from barnraise.training.warm_start import fetch_initial_weights, load_start_model

SHARES_THE_ENDED_RUN = pytest.mark.xdist_group("ended run")


@pytest.fixture(scope="module")
def ended_run(shared_swarm):
    """Train a run to its end with one worker, Ada; tests only read it."""
    run = shared_swarm(token_budget=30_000)
    ada = run.start("ada")
    ada.join()
    return run, ada


def start_of(run, ada) -> Start:
    return Start(
        run=run.manifest.run, digest=ada.status["anchor"], tokens=ada.status["ledger_tokens"]
    )


@SHARES_THE_ENDED_RUN
def test_warm_started_run_continues_identically_on_every_machine(
    ended_run, swarm, monkeypatch, caplog
):
    before, ada = ended_run
    monkeypatch.setattr(prefetch, "SNAPSHOT_SECONDS", 4.0)  # that Ben waits for Ada's weights
    after = swarm(token_budget=60_000, folder="after")
    folder = after.home("ada").path / "runs" / before.manifest.run
    blobs = BlobStore(folder / "blobs")
    spec = replace(after.spec, start=start_of(before, ada))
    initial = fetch_initial_weights(
        StateDir(before.folder / "ada"), threading.Event(), lambda: None, spec, blobs.store
    )
    assert len(initial.fragments) == spec.model.layers + 2 and initial.tokenizer is None
    after.spec = replace(spec, start=replace(spec.start, fragments=tuple(initial.fragments)))
    assert not problems(after.spec) and RunSpec.from_json(after.spec.to_json()) == after.spec

    ben = after.start("ben", knows=["ada"])  # starts before the one machine that has the weights
    after.until(lambda: "4 of 4 files of the initial weights still to fetch" in caplog.text)
    ended_at = ada.status["validation_last"][1]
    control = LocalControl(folder)
    control.pause()
    heirs = [after.start("ada", knows=["ben"]), ben]
    # Ben trains alone at first: two machines that lose each other for a while add up what both
    # have learnt, and may end at a higher loss.
    after.until(lambda: (ben.status.get("validation_last") or [0])[0] >= 20_000)
    assert ben.status["validation_last"][1] < ended_at
    control.resume()
    for heir in heirs:
        heir.join(120)
    assert ben.status["validation_first"] == [0, ended_at], "the same weights bit for bit"
    # Ada may start with Ben's first updates.
    assert heirs[0].status["validation_first"][1] < ended_at + 0.5
    assert len({(heir.status["vector"], heir.status["anchor"]) for heir in heirs}) == 1
    assert all(heir.status["checksum"]["corruptions"] == 0 for heir in heirs), (
        "the anchor is compared with its own initial weights"
    )


def test_run_begins_again_from_the_weights_before_an_excluded_volunteer(swarm, caplog):
    """Ada's folder stands at later weights; the updates since lead back to the ones before."""
    before = swarm(token_budget=10_000_000, folder="before", evaluate_every=5_000)
    ada = before.start("ada")
    before.until(lambda: (ada.status.get("validation_last") or [0])[0] >= 10_000)
    checkpoint = ada.worker.metrics.checkpoint
    eve = before.start("eve", knows=["ada"])
    before.until(lambda: len(ada.worker.anchor.vector) == 2)
    assert ada.worker.ledger.milestones.find(checkpoint.digest).vector.keys() == {
        ada.worker.exchange.author.name
    }
    eve.leave()
    ada.leave()
    assert ada.status["anchor"] != checkpoint.digest
    after = swarm(token_budget=60_000, folder="after")
    start = Start(before.manifest.run, checkpoint.digest, checkpoint.tokens)
    blobs = BlobStore(after.folder / "blobs")
    initial = fetch_initial_weights(
        StateDir(before.folder / "ada"),
        threading.Event(),
        lambda: None,
        replace(after.spec, start=start),
        blobs.store,
    )
    fragments = [fragment_from_bytes(blobs.read(name)) for name in initial.fragments]
    assert digest_fragments(fragments) == checkpoint.digest
    assert "rebuilt from the updates since" in caplog.text


def test_run_begins_with_a_model_in_a_folder_and_states_its_loss(swarm, tmp_path, caplog):
    run = swarm(token_budget=30_000)
    theirs = make_trained_model(run.spec.model)
    folder = tmp_path / "model"
    folder.mkdir()
    export_hugging_face(folder, theirs)
    draft = replace(run.spec, model=replace(run.spec.model, layers=7), start=Start(model="folder"))
    blobs = BlobStore(run.home("ada").path / "runs" / run.manifest.run / "blobs")
    initial = load_start_model(draft, blobs.store, folder)
    assert initial.model == run.spec.model and initial.tokenizer is None
    start = replace(draft.start, fragments=tuple(initial.fragments))
    run.spec = replace(run.spec, start=start)
    assert not problems(run.spec) and RunSpec.from_json(run.spec.to_json()) == run.spec

    workers = [run.start("ada", knows=["ben"]), run.start("ben", knows=["ada"])]
    run.until(lambda: all("validation_first" in worker.status for worker in workers))
    for worker in workers:
        worker.join(120)
    text = workers[0].worker.text
    loss = mean_loss(theirs, text.validation_batches(HELD_OUT, run.spec.model.context))
    firsts = [worker.status["validation_first"] for worker in workers]
    # One of them may start with the other's first updates.
    assert [0, pytest.approx(loss, abs=1e-4)] in firsts
    assert f"begins at a loss of {loss:.2f}" in caplog.text
    assert len({worker.status["anchor"] for worker in workers}) == 1
    assert workers[0].status["validation_last"][1] < loss


def mean_loss(trained, batches) -> float:
    """Return the mean loss on token batches, computed from the exported weights."""
    logits = torch.cat([compute_logits(trained, batch[:, :-1]) for batch in batches])
    targets = torch.cat([batch[:, 1:] for batch in batches])
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_model_that_a_run_cannot_train_is_refused_at_once(swarm, tmp_path):
    run = swarm()
    draft = replace(run.spec, start=Start(model="folder"))
    with pytest.raises(UnsupportedModelError, match="prepare RUN --model"):
        load_start_model(draft, lambda data: "0" * 64, None)
    export_hugging_face(tmp_path, make_trained_model(BPE, bpe_file()))
    with pytest.raises(UnsupportedModelError, match="byte-pair encoding"):
        load_start_model(draft, lambda data: "0" * 64, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    with pytest.raises(UnsupportedModelError, match="model_type"):
        load_start_model(draft, lambda data: "0" * 64, tmp_path)


@SHARES_THE_ENDED_RUN
def test_machine_without_the_start_weights_says_why(ended_run, tmp_path):
    before, ada = ended_run
    wrong = replace(before.spec, start=replace(start_of(before, ada), digest="0" * 64))
    for home in (StateDir(before.folder / "ada"), StateDir(tmp_path / "new")):
        # The weights are not on this machine, and fetching them requires an enrolment.
        with pytest.raises(StateError, match="not enrolled"):
            fetch_initial_weights(
                home, threading.Event(), lambda: None, wrong, lambda data: "0" * 64
            )


@SHARES_THE_ENDED_RUN
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
            check_start_weights(blobs, wrong)
    right = replace(spec, start=replace(spec.start, fragments=tuple(initial.fragments)))
    check_start_weights(blobs, right)


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
