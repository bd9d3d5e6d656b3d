"""Tasks and previews that an owner publishes, and scores of the tasks, wherever they are shown."""

import pytest
from django.utils import timezone
from helpers.site.pages import open_client
from helpers.worker.command_line import invoke
from helpers.worker.fake_coordinator import enrol
from pydantic import ValidationError

from barnraise.cli.evaluate import fetch_tasks
from barnraise.errors import CoordinatorError, TextError
from barnraise.protocol.evaluation import PreviewDocument, PublishedTexts, TaskFile, TaskScore
from barnraise.protocol.reports import CheckpointView
from barnraise.protocol.signing import digest
from barnraise.state_dir import StateDir
from coordinator.accounts.deletion import delete_account
from coordinator.eventlog.models import LogEvent, PrivateData
from coordinator.lib import site_identity
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import PublishedText, Run
from coordinator.telemetry.task_scores import load_scores

pytestmark = pytest.mark.django_db(transaction=True)
TEXT = '{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}\n' * 3
TASKS = PublishedTexts(tasks=TaskFile(text=TEXT))
DOCUMENTS = PublishedTexts(preview=[PreviewDocument(text="Once <b>upon</b>\na time")])


def score(correct: int, tokens: int = 1_000, **changed) -> TaskScore:
    fields = {"tasks": digest(TEXT), "tokens": tokens, "correct": correct, "count": 3}
    return TaskScore(**{**fields, **changed})


def submit(machine, run, message: TaskScore | PublishedTexts) -> int:
    """Send a message as a machine does, and return the status of the answer."""
    path = "scores" if isinstance(message, TaskScore) else "published"
    return machine.send_request("POST", f"/runs/{run.slug}/{path}", message).status_code


def test_owner_publishes_tasks_and_a_preview_and_replaces_each_alone(
    person, draft, volunteer, manifest, client, built_frontend
):
    run = draft(person())
    machine = volunteer(run.owner)
    assert submit(machine, run, DOCUMENTS) == 409, "there is no text yet"
    assert machine.post_manifest(run, manifest(run)).status_code == 200
    assert submit(machine, run, DOCUMENTS) == submit(machine, run, TASKS) == 200
    run.refresh_from_db()
    assert PublishedText.find(run) == TASKS.model_copy(update={"preview": DOCUMENTS.preview})
    page = open_client(run.owner).get(f"/runs/{run.slug}/").content.decode()
    assert "Once &lt;b&gt;upon&lt;/b&gt;\na time" in page and "Text preview" in page
    machine.send_request("DELETE", f"/runs/{run.slug}/manifest")
    run.refresh_from_db()
    assert PublishedText.find(run).preview == [], "it was of another text"
    assert PublishedText.find(run).tasks == TASKS.tasks


def test_only_the_owners_confirmed_machine_publishes(person, launched_run, volunteer):
    run, machine = launched_run(person())
    stranger = volunteer(person("eve@example.org"), 2)
    assert submit(stranger, run, TASKS) == 403
    type(machine.machine).objects.filter(pk=machine.machine.pk).update(confirmed=None)
    assert submit(machine, run, TASKS) == 403 and not PublishedText.objects.exists()


def test_scores_are_of_the_runs_tasks_and_of_people_who_count(
    person, launched_run, volunteer, monkeypatch
):
    run, machine = launched_run(person())
    stranger = volunteer(person("eve@example.org"), 2)
    assert submit(machine, run, score(2)) == 409, "the run has no tasks"
    assert submit(machine, run, TASKS) == 200
    assert submit(machine, run, score(2, tasks="a" * 64)) == 409
    assert submit(machine, run, score(2, count=4)) == 409
    assert submit(machine, run, score(2, tokens=10**15)) == 409
    assert submit(stranger, run, score(3)) == 409 and load_scores(run) == {}
    assert submit(machine, run, score(1)) == submit(machine, run, score(2)) == 200
    assert submit(machine, run, score(3, tokens=500)) == 200
    shown = {tokens: row.correct for tokens, row in load_scores(run).items()}
    assert list(shown.items()) == [(500, 3), (1_000, 2)], "the last of one place counts"
    other = TEXT.replace("2 + 2", "3 + 1")
    assert submit(machine, run, PublishedTexts(tasks=TaskFile(text=other))) == 200
    TtlCache.clear_all()
    assert load_scores(run) == {}, "the scores are of other tasks"


def test_score_stands_beside_the_loss_on_every_page(
    person, launched_run, numbered_report, built_frontend
):
    run, machine = launched_run(person())
    view = CheckpointView(
        tokens=1_000, vector="a" * 64, digest="c" * 64, checksum="0" * 16, size=4_000
    )
    machine.store_reports(run, numbered_report(1, checkpoint=view, anchor=None))
    Run.objects.filter(pk=run.pk).update(ledger_tokens=1_000, status="training")
    assert submit(machine, run, TASKS) == submit(machine, run, score(2)) == 200
    TtlCache.clear_all()
    client = open_client(run.owner)
    page = client.get(f"/runs/{run.slug}/").content.decode()
    tile, _, rest = page.partition('data-tile="score"')[2].partition("</div>")
    assert "66 %" in tile and "hidden" not in tile.split(">")[0]
    assert "At 1.00 K tokens it answers <b>2 of 3</b> tasks right." in rest
    assert 'data-label="Tasks right">66 %' in rest
    compared = client.get("/runs/compare/", {"run": run.slug}).content.decode()
    assert "Tasks right" in compared and "66 %" in compared
    snapshot = client.get(f"/live/{run.pk}/").json()["run"]
    assert snapshot["score"] == 0.666 and "score" in snapshot["tiles"]


def test_published_texts_leave_with_the_account_and_are_in_no_event(
    person, draft, launched_run, volunteer, manifest
):
    run, machine = launched_run(person(), name="Dawn")
    other = draft(run.owner, name="Dusk")
    assert machine.post_manifest(other, manifest(other)).status_code == 200
    assert submit(machine, run, TASKS) == submit(machine, other, DOCUMENTS) == 200
    assert PrivateData.objects.filter(body__contains="upon").count() == 1
    assert not LogEvent.objects.filter(body__contains="upon").exists()
    delete_account(run.owner, run.owner)
    assert not PublishedText.objects.exists()
    assert not PrivateData.objects.filter(aggregate__startswith="published:").exists()


def test_commands_publish_tasks_and_fetch_them(
    live_server, person, launched_run, monkeypatch, tmp_path, valkey
):
    run, _ = launched_run(person(name="Ada"), name="Dawn")
    home = StateDir(tmp_path / "home")
    monkeypatch.setenv("BARNRAISE_HOME", str(home.path))
    file = tmp_path / "tasks.jsonl"
    file.write_text(TEXT, "utf-8")
    machine = run.owner.machines.create(
        key=home.identity.key, hostname="loom", confirmed=timezone.now()
    )
    enrol(home, live_server.url, site_identity.identity().key, str(machine.pk))
    with pytest.raises(TextError, match="has published no tasks"):
        fetch_tasks(home, "dawn")
    publish = ("evaluate", "dawn", "--publish", "--tasks", str(file))
    assert "'dawn' has 3 tasks now." in invoke(*publish)
    assert fetch_tasks(home, "dawn") == TEXT
    file.write_text(TEXT * 400, "utf-8")
    with pytest.raises(TextError, match="a run's tasks 60,000 at most"):
        invoke(*publish)
    file.write_text(TEXT + "\0", "utf-8")
    with pytest.raises(TextError, match=r"line 4 is no JSON"):
        invoke(*publish)
    file.write_text(TEXT, "utf-8")
    with pytest.raises(CoordinatorError, match="there is no run 'dusk'"):
        invoke("evaluate", "dusk", "--publish", "--tasks", str(file))


def test_site_refuses_what_is_no_tasks(person, launched_run):
    run, machine = launched_run(person())
    answer = machine.send_request(
        "POST", f"/runs/{run.slug}/published", None, sent=b'{"tasks": {"text": "nonsense"}}'
    )
    assert answer.status_code == 422 and "line 1 is no JSON" in answer.json()["error"]
    with pytest.raises(ValidationError):
        TaskFile(text="nonsense")
