"""Samples in reports are stored once, shown by position, and only from people who count."""

import pytest

from barnraise.protocol.reports import Sample, SamplesView
from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry import samples as stored_samples
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.samples import list_sample_groups

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


def view(tokens: int, *texts: str) -> SamplesView:
    return SamplesView(
        tokens=tokens, texts=[Sample(prompt=i, text=text) for i, text in enumerate(texts)]
    )


@pytest.fixture
def run_with_prompts(person, volunteer, manifest):
    """Return a launched run of Ada with two prompts, and her machine."""
    ada = person()
    fields = {"prompts": ["Once upon", "x ="], "recipe.token_budget": 100_000}
    run = Run.create(ada, NewRun("Tales", spec_from_fields(fields)))
    machine = volunteer(ada)
    run.launch()
    assert machine.post_manifest(run, manifest(run)).status_code == 200
    run.refresh_from_db()
    assert run.spec_text and run.spec.prompts == ("Once upon", "x =")
    machine.join(run)
    return run, machine


def test_samples_are_listed_by_position_with_their_prompts(
    run_with_prompts, numbered_report, client, built_frontend
):
    run, machine = run_with_prompts
    machine.store_reports(run, numbered_report(1, samples=view(100, " a time\n<b>", "1")))
    machine.report(run, numbered_report(1, samples=view(100, "twice", "2")))
    machine.report(run, numbered_report(2, samples=view(300, " a barn", "2", "no such prompt")))
    machine.store_reports(run, numbered_report(3, samples=view(10**12, "beyond the run")))
    groups = list_sample_groups(run)
    assert [(group.tokens, group.texts) for group in groups] == [
        (300, (("Once upon", " a barn"), ("x =", "2"))),
        (100, (("Once upon", " a time\n<b>"), ("x =", "1"))),
    ]
    for address in (f"/runs/{run.slug}/", f"/runs/{run.slug}/checkpoints/"):
        page = client.get(address).content.decode()
        assert " a time\n&lt;b&gt;" in page and "At <b>300</b> tokens, by pc-1" in page


def test_strangers_samples_are_not_shown(run_with_prompts, numbered_report, strangers):
    run, _ = run_with_prompts
    (stranger,) = strangers(run, 2)
    stranger.store_reports(run, numbered_report(1, samples=view(100, "buy this", "")))
    assert run.samples.count() == 2 and list_sample_groups(run) == []


def test_strangers_flood_of_samples_deletes_no_others(
    run_with_prompts, numbered_report, monkeypatch, strangers
):
    run, machine = run_with_prompts
    monkeypatch.setattr(stored_samples, "MAX_SAMPLES", 2)
    (stranger,) = strangers(run, 2)
    machine.report(run, numbered_report(1, samples=view(100, "a", "b")))
    for seq in range(1, 4):
        stranger.report(run, numbered_report(seq, samples=view(1000 * seq, "x", "y")))
    drain_queue()
    assert stored_samples.prune_samples(run) == 6
    assert [group.tokens for group in list_sample_groups(run)] == [100]


def test_oldest_samples_are_deleted(run_with_prompts, numbered_report, monkeypatch):
    run, machine = run_with_prompts
    monkeypatch.setattr(stored_samples, "MAX_SAMPLES", 3)
    for seq in range(1, 4):
        machine.report(run, numbered_report(seq, samples=view(100 * seq, "a", "b")))
    drain_queue()
    assert stored_samples.prune_samples(run) == 3
    assert [group.tokens for group in list_sample_groups(run)] == [300, 200]
