"""Test the life of one worker: its phases, and in which order a round is published and saved."""

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_hardware import cpu_machine
from helpers.drill_modules import import_drill_module
from helpers.network.memory_transport import MemoryNetwork
from helpers.updates.tickets import sign_ticket
from sharded_documents import shard_documents
from single_site import SingleSite
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

from barnraise.errors import PlanError, StateError
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger import Ledger
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import MemoryFacts
from barnraise.protocol.coordinator_messages import Directive, Shard
from barnraise.protocol.enums import Activity, Role, RunStatus
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import MAX_SHARD_TOKENS, ModelSpec, Recipe, RunSpec, TextSpec
from barnraise.state_dir import StateDir
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.text.prompt_codec import PromptCodec
from barnraise.text.tokenizer import tokenizer_errors
from barnraise.training import cpu_share, pauses, train
from barnraise.training.checkpoint import CheckpointSlots
from barnraise.training.join import JoinedRun
from barnraise.training.local_control import LocalControl
from barnraise.training.local_status import read_status
from barnraise.training.memory_watch import MemoryWatch
from barnraise.training.train import Worker

owner_files = import_drill_module("owner_files")
RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
MIRROR = Identity(b"m" * 32)
MODEL = ModelSpec(layers=1, width=16, heads=1, context=16, vocabulary=256)
STEP_TOKENS = 4 * MODEL.context
ROUND_STEPS = 4
RECIPE = Recipe(
    token_budget=3 * ROUND_STEPS * STEP_TOKENS,
    learning_rate=3e-3,
    warmup_tokens=5 * STEP_TOKENS,
    step_sequences=4,
    round_steps=ROUND_STEPS,
    evaluate_every=1 << 30,
)
LONG = 1 << 30  # tokens: a budget that no test spends


class RecordingWorker(Worker):
    """A worker that records what it does.

    Attributes:
        acts: what it does, in this order.
        between_steps: called after each step.
        while_freed: called now and then while a pause has closed the engine.
    """

    acts: list[str]
    between_steps: Callable[[], None]
    while_freed: Callable[[], None]

    def report_status(self, at_once: bool = False) -> None:
        super().report_status(at_once)
        if self.is_freed:
            self.while_freed()

    def publish_round(self, *arguments: Any) -> None:
        super().publish_round(*arguments)
        self.acts.append("publish")

    def save_checkpoint(self, closing: bool = False) -> None:
        super().save_checkpoint(closing)
        self.acts.append("save all" if closing else "save")

    def run_between_steps(self) -> None:
        super().run_between_steps()
        if self.acts.count("step") < self.metrics.step:
            self.acts.append("step")
        self.between_steps()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.acts.append("stopped")

    def prepare(self) -> None:
        self.acts.append("preparing")
        super().prepare()

    def train(self) -> None:
        self.acts.append("training")
        super().train()

    def drain(self) -> None:
        self.acts.append("draining")
        super().drain()


@pytest.fixture
def new_worker(tmp_path, monkeypatch) -> Iterator[Callable[..., RecordingWorker]]:
    """Provide a factory of workers without peers and site in one folder, one after the other.

    `tokenizer` and further fields of the manifest are those of the run's owner.
    """
    torch.set_num_threads(1)
    monkeypatch.setattr(train, "ALONE_SECONDS", 0.1)
    home = StateDir(tmp_path / "home")
    network = MemoryNetwork()

    def create(
        token_budget: int = RECIPE.token_budget,
        tokenizer: bytes = b"",
        model: ModelSpec = MODEL,
        limits: Limits | None = None,
        **text: Any,
    ) -> RecordingWorker:
        folder = home.open_run(RUN)
        blobs = BlobStore(folder.path / "blobs")
        manifest = shard_documents(
            TextSpec(tokenizer="bytes"),
            MODEL.vocabulary,
            RUN,
            blobs.store,
            [f"Document {i} of the text. ".encode() * 9 for i in range(40)],
        )
        if tokenizer:
            text["tokenizer"] = blobs.store(tokenizer)
        manifest = manifest.model_copy(update=text)
        recipe = Recipe(**{**vars(RECIPE), "token_budget": token_budget})
        spec = RunSpec(
            model,
            TextSpec(tokenizer="bytes"),
            recipe,
            seed=7,
            owner=MIRROR.key,
            roots=(MIRROR.key,),
            manifest=digest(MIRROR.sign("manifest", manifest).body),
        )
        key, now = home.identity.key, time.time()
        fields = {"volunteer": digest("ada"), "max_tokens_per_second": 1 << 40, "issued": now}
        joined = JoinedRun(
            run=RUN,
            name="a run",
            machine=RUN,
            folder=folder,
            coordinator=SingleSite("http://127.0.0.1:9", home.identity, MIRROR.key),
            spec=spec,
            spec_digest=digest(spec.to_json()),
            manifest=manifest,
            ticket=sign_ticket(MIRROR, key, run=RUN, machine=RUN, roles=[Role.WORKER], **fields),
            directive=Directive(run=RUN, machine=RUN, status=RunStatus.TRAINING, issued=now),
            acknowledged=0,
            peers=(),
        )
        hardware = cpu_machine(cores=1, disk=8 << 30)
        worker = RecordingWorker(
            joined, threading.Event(), hardware, limits, transport=network.transport(key)
        )
        worker.acts = []
        worker.between_steps = worker.while_freed = lambda: None
        return worker

    return create


def acts_of(worker: RecordingWorker) -> str:
    """Return what a worker did, with the number of acts that are repeated."""
    groups = [(act, len(list(group))) for act, group in itertools.groupby(worker.acts)]
    return ", ".join(act if count == 1 else f"{count} {act}" for act, count in groups)


def read_ledger(folder: Path) -> list[int]:
    """Return the tokens of each update in a ledger."""
    ledger = Ledger(folder)
    tokens = [update.tokens for _, update in ledger.updates_since({})]
    ledger.close()
    return tokens


def test_worker_alone_trains_publishes_and_saves_round_by_round(new_worker):
    worker = new_worker()
    worker.run()
    one_round = f"{ROUND_STEPS} step, publish, save, "
    assert acts_of(worker) == (
        f"preparing, save, training, {3 * one_round}draining, save all, stopped"
    )
    folder = worker.joined.folder.path
    assert read_ledger(folder) == [ROUND_STEPS * STEP_TOKENS] * 3
    assert not (folder / "running.json").exists() and worker.metrics.last_validation is not None
    again = new_worker()
    again.run()
    assert "publish" not in again.acts and again.acts[-1] == "stopped", "the budget is spent"


@pytest.mark.parametrize(
    ("tokenizer", "prompts", "sentence"),
    [
        (owner_files.TOKENIZERS["a token number of 4·10⁸"], [[1]], "the token number '400000000'"),
        (b"", [[300]], "beyond the vocabulary of 256"),
    ],
)
def test_owners_tokenizer_costs_the_samples_and_not_the_training(
    new_worker, caplog, tokenizer, prompts, sentence
):
    worker = new_worker(tokenizer=tokenizer, prompts=prompts)
    worker.run()
    assert "this machine writes no samples" in caplog.text and sentence in caplog.text
    assert len(read_ledger(worker.joined.folder.path)) == 3


def test_owners_tokenizer_that_panics_costs_the_samples_only(new_worker, caplog, monkeypatch):
    panicking = Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    panicking.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")

    def decode(codec, tokens):
        with tokenizer_errors("the run's tokenizer"):
            return str(panicking.encode("a" * 100 + "b"))

    monkeypatch.setattr(PromptCodec, "decode", decode)
    worker = new_worker(prompts=[[1]])
    worker.run()
    assert caplog.text.count("this machine stops writing samples") == 1
    assert len(read_ledger(worker.joined.folder.path)) == 3


def test_text_larger_than_the_disk_is_refused_before_anything_is_fetched(new_worker):
    shards = [Shard(digest=digest(str(n)), tokens=MAX_SHARD_TOKENS) for n in range(1000)]
    with pytest.raises(PlanError, match=r"takes 536\.\d GB of disk, and .* may be used here"):
        new_worker(train=shards)


def test_leaving_worker_publishes_the_unfinished_round_and_saves_once(new_worker):
    worker = new_worker(LONG)
    worker.between_steps = lambda: worker.metrics.step == ROUND_STEPS + 2 and worker.leaving.set()
    worker.run()
    assert acts_of(worker) == (
        f"preparing, save, training, {ROUND_STEPS} step, publish, save, "
        "2 step, publish, draining, save all, stopped"
    )
    folder = worker.joined.folder.path
    assert read_ledger(folder) == [ROUND_STEPS * STEP_TOKENS, 2 * STEP_TOKENS]
    saved = CheckpointSlots(folder / "checkpoint").load()
    assert saved is not None and saved[1].last_seq == 2 and saved[1].step == ROUND_STEPS + 2


def test_pause_ends_the_round_and_the_next_one_follows_it(new_worker):
    worker = new_worker(LONG)
    control = LocalControl(worker.joined.folder.path)
    reasons = []

    def between_steps() -> None:
        reasons.append(worker.metrics.pause.reason if worker.metrics.pause else "")
        if reasons[-1]:
            control.resume()
        elif len(reasons) == 2:
            control.pause()
        elif worker.metrics.step == 5:
            worker.leaving.set()

    worker.between_steps = between_steps
    worker.run()
    assert "paused on this machine" in reasons and worker.metrics.pause is None
    assert worker.metrics.step == 5
    assert sum(read_ledger(worker.joined.folder.path)) == (5 * STEP_TOKENS)


def run_to_digest(worker: RecordingWorker) -> str:
    """Run a worker, and return the digest of the shared weights that it has in the end."""
    worker.run()
    saved = CheckpointSlots(worker.joined.folder.path / "checkpoint").load()
    assert saved is not None
    fragments = [saved[0][name] for name in sorted(saved[0]) if name.startswith("anchor.")]
    return digest(b"".join(fragment.numpy().tobytes() for fragment in fragments))


def pause_at(worker: RecordingWorker, steps: set[int]) -> LocalControl:
    """Pause a worker after each of these steps; the caller resumes it."""
    control = LocalControl(worker.joined.folder.path)

    def between_steps() -> None:
        if worker.metrics.step in steps:
            steps.remove(worker.metrics.step)
            control.pause()

    worker.between_steps = between_steps
    return control


@pytest.fixture
def undisturbed(new_worker) -> str:
    """Return the digest of a run that nothing has paused; its folder is removed."""
    worker = new_worker()
    found = run_to_digest(worker)
    shutil.rmtree(worker.joined.folder.path)
    return found


@pytest.mark.integration
@pytest.mark.parametrize("steps", [{1}, {2, 5, 7}, {ROUND_STEPS}])
def test_run_whose_pauses_free_the_memory_has_the_same_bits(
    new_worker, undisturbed, monkeypatch, steps
):
    monkeypatch.setattr(pauses, "MOMENT_SECONDS", 0.0)
    worker = new_worker()
    pauses_left = len(steps)
    control = pause_at(worker, steps)
    freed: list[bool] = []

    def while_freed() -> None:
        freed.append(not hasattr(worker, "engine"))
        control.resume()

    worker.while_freed = while_freed
    assert run_to_digest(worker) == undisturbed
    assert len(freed) == pauses_left and all(freed)
    assert not (worker.joined.folder.path / "paused_round").exists()
    assert read_ledger(worker.joined.folder.path) == [ROUND_STEPS * STEP_TOKENS] * 3


@pytest.mark.integration
def test_pause_of_a_state_on_disk_frees_the_memory_and_keeps_the_bits(new_worker, monkeypatch):
    monkeypatch.setattr(pauses, "MOMENT_SECONDS", 0.0)
    model = ModelSpec(layers=12, width=48, heads=1, context=16, vocabulary=256)
    digests = []
    for steps in (set(), {2, ROUND_STEPS + 1}):
        worker = new_worker(model=model, limits=Limits(memory=6_000_000))
        assert worker.plan.on_disk
        control = pause_at(worker, steps)
        worker.while_freed = control.resume
        worker.run()
        status = read_status(worker.joined.folder.path)
        assert status is not None and status.activity is Activity.FINISHED
        digests.append(status.anchor)
        assert not steps
        shutil.rmtree(worker.joined.folder.path)
    assert digests[0] is not None and digests[0] == digests[1]


def test_worker_that_leaves_in_a_pause_has_the_same_bits_after_it(
    new_worker, undisturbed, monkeypatch
):
    monkeypatch.setattr(pauses, "MOMENT_SECONDS", 0.0)
    worker = new_worker()
    control = pause_at(worker, {ROUND_STEPS + 2})
    worker.while_freed = worker.leaving.set
    worker.run()
    assert read_ledger(worker.joined.folder.path) == [ROUND_STEPS * STEP_TOKENS]
    again = new_worker()
    assert LocalControl(again.joined.folder.path).is_paused, "it lasts beyond the restart"
    again.while_freed = control.resume
    assert run_to_digest(again) == undisturbed
    assert read_ledger(again.joined.folder.path) == [ROUND_STEPS * STEP_TOKENS] * 3


def test_damaged_state_of_a_pause_costs_the_unfinished_round_only(new_worker, monkeypatch, caplog):
    monkeypatch.setattr(pauses, "MOMENT_SECONDS", 0.0)
    worker = new_worker()
    control = pause_at(worker, {ROUND_STEPS + 2})
    worker.while_freed = worker.leaving.set
    worker.run()
    control.resume()
    saved = worker.joined.folder.path / "paused_round" / "a" / "tensors.safetensors"
    saved.write_bytes(saved.read_bytes()[:-1])
    again = new_worker()
    again.run()
    assert "is damaged and not used" in caplog.text
    assert again.metrics.step == 3 * ROUND_STEPS
    assert read_ledger(again.joined.folder.path) == [ROUND_STEPS * STEP_TOKENS] * 3


def test_step_that_a_pause_ends_is_taken_again_with_the_same_bits(
    new_worker, undisturbed, monkeypatch
):
    monkeypatch.setattr(train, "PERSON_POLL_SECONDS", 0.0)
    worker = new_worker()
    control = LocalControl(worker.joined.folder.path)
    asked = itertools.count()
    interrupted: list[int] = []
    should_end_step = worker.should_end_step

    def should_end() -> bool:
        if next(asked) in (7, 20, 21):  # in the middle of a step
            control.pause()
        has_ended = should_end_step()
        if has_ended:
            interrupted.append(worker.metrics.step)
            control.resume()
        return has_ended

    worker.should_end_step = should_end
    assert worker.plan.clipping == "exact"
    assert run_to_digest(worker) == undisturbed
    assert len(interrupted) >= 2


def test_learning_rate_follows_the_tokens_of_ledger_and_round(new_worker):
    worker = new_worker(LONG)
    rates: list[float] = []

    def between_steps() -> None:
        if worker.metrics.learning_rate is not None and len(rates) < worker.metrics.step:
            rates.append(worker.metrics.learning_rate)
        if worker.metrics.step == ROUND_STEPS + 2:
            worker.leaving.set()

    worker.between_steps = between_steps
    worker.run()
    expected = [
        RECIPE.learning_rate * learning_rate_scale(worker.spec.recipe, step * STEP_TOKENS)
        for step in range(ROUND_STEPS + 2)
    ]
    assert rates == pytest.approx(expected) and rates[0] < rates[-1]


def test_status_file_counts_how_often_memory_ran_short(new_worker):
    watch = MemoryWatch(measure=lambda: MemoryFacts(total=10**9, available=10**9))
    watch.on_shortage()
    watch.on_shortage()
    worker = new_worker()
    worker.watch_memory(watch)
    worker.run()
    status = read_status(worker.joined.folder.path)
    assert status is not None and status.memory_shortages == 2


@pytest.mark.parametrize(("seconds", "is_due"), [(0.0, True), (train.RETURN_SECONDS, False)])
def test_freed_memory_is_returned_after_a_save_when_due(new_worker, monkeypatch, seconds, is_due):
    returned: list[int] = []
    monkeypatch.setattr(train, "RETURN_SECONDS", seconds)
    monkeypatch.setattr(train, "return_freed_memory", lambda: returned.append(1))
    worker = new_worker()
    worker.run()
    saves = [act for act in worker.acts if act.startswith("save")]
    assert saves and len(returned) == (len(saves) if is_due else 0)


def test_rest_after_a_step_is_no_part_of_its_seconds(new_worker, monkeypatch):
    monkeypatch.setattr(cpu_share, "SHORTEST_WORK", 0.0)
    worker = new_worker(ROUND_STEPS * STEP_TOKENS, limits=Limits(cpu=5))
    worker.run()
    assert worker.metrics.step_seconds > 0


def test_failing_disk_ends_in_one_sentence_with_everything_closed(new_worker, monkeypatch):
    worker = new_worker(LONG)

    def fail() -> None:
        if worker.metrics.step == 2:
            raise OSError(28, "No space left on device")

    worker.between_steps = fail
    with pytest.raises(StateError, match=r"stopped: .*No space left on device.* join again"):
        worker.run()
    assert acts_of(worker) == "preparing, save, training, 2 step, stopped"
    again = new_worker()  # the folder is not locked any longer
    again.run()
    assert again.acts[-1] == "stopped" and again.metrics.step > 0
