"""Test runs: launch, decisions, drafts, names, and what happens at the same moment."""

import json
import threading
import unicodedata

import pytest
from django.db import connection

from barnraise.errors import SpecError
from barnraise.protocol import enums, messages
from barnraise.protocol.signing import digest
from barnraise.spec import RunSpec, TextSpec
from coordinator.accounts.models import User
from coordinator.audit.models import AuditEntry
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.runs.drafts import NewRun
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import Run, RunQuerySet
from coordinator.runs.spec_form import spec_from_fields

Status = enums.RunStatus
BPE = {"recipe.token_budget": 100_000, "seed": 7}
BYTES = {**BPE, "text.tokenizer": "bytes"}


def test_launch_fixes_mirror_owner_and_text_in_the_spec(adas_run):
    run, owner = adas_run
    spec = RunSpec.from_json(run.spec_text)
    assert spec.roots == (site_identity.identity().key,)
    assert spec.owner == owner.identity.key
    assert spec.manifest == digest(run.manifest["body"])
    assert run.spec_digest == digest(run.spec_text)
    assert not run.edit("Another", spec) and run.name == "A run"
    assert not run.accept_manifest(messages.Signed.model_validate(run.manifest))


def test_pause_and_resume_return_whether_the_status_changed(adas_run):
    run, _ = adas_run
    assert not run.resume()
    assert run.pause() and run.state is Status.PAUSED
    assert not run.pause() and not advance_run(run)
    assert run.resume() and run.state is Status.TRAINING
    assert run.finish() and run.finished and run.is_over
    assert not run.cancel() and not run.pause() and run.state is Status.FINISHED


def test_stale_run_object_cannot_undo_a_decision(adas_run):
    run, _ = adas_run
    stale = Run.objects.get(pk=run.pk)
    assert run.cancel()
    assert not stale.pause() and stale.state is Status.CANCELLED


@pytest.mark.django_db(transaction=True)
def test_one_of_two_concurrent_decisions_succeeds(adas_run):
    run, _ = adas_run
    outcomes = []
    gate = threading.Barrier(2)

    def decide(action):
        own_copy = Run.objects.get(pk=run.pk)
        gate.wait()
        outcomes.append(getattr(own_copy, action)())
        connection.close()

    threads = [threading.Thread(target=decide, args=(action,)) for action in ("cancel", "finish")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False, True]


def test_runs_of_the_same_name_get_different_slugs(person, draft):
    owner = person()
    first, second = draft(owner, "Même  nom!"), draft(owner, "Même nom!")
    assert first.slug == "meme-nom" and second.slug.startswith("meme-nom-")
    assert Run.objects.find(second.slug) == Run.objects.find(str(second.pk)) == second
    assert Run.objects.find("\0") is None and Run.objects.find("x" * 500) is None


def test_run_of_any_script_has_an_address_of_its_own(person, draft, client):
    owner = person()
    dawn, again = draft(owner, "夜明け"), draft(owner, "夜明け")
    assert dawn.slug == "夜明け" and again.slug == f"夜明け-{again.pk.hex[-8:]}"
    rocket, plain = draft(owner, "🚀"), draft(owner, "Run")
    assert rocket.slug == str(rocket.pk) and plain.slug.startswith("run-")
    client.force_login(owner)
    for run in (dawn, again, rocket, plain):
        assert Run.objects.find(run.slug) == run
        assert run.get_absolute_url().isascii(), "headers and emails carry it"
        for path in (run.get_absolute_url(), f"/runs/{run.slug}/"):
            page = client.get(path)
            assert page.status_code == 200 and f"/runs/{run.slug}" in page.text
    decomposed = unicodedata.normalize("NFD", "夜が明ける")
    assert draft(owner, decomposed) == Run.objects.find(decomposed)


def test_address_of_an_earlier_version_remains(person, draft):
    run = draft(person(), "夜明け")
    Run.objects.filter(pk=run.pk).update(slug="run")
    assert Run.objects.find("run") == run
    assert draft(run.owner, "Run").slug != "run"


def test_renamed_draft_gets_the_address_of_its_name(person, draft):
    owner = person()
    first, second = draft(owner, "Letters A"), draft(owner, "Letters B")
    assert second.edit("Letters A", second.spec)
    assert second.slug == f"letters-a-{second.pk.hex[-8:]}"
    assert first.edit("Runes", first.spec) and first.slug == "runes"
    assert second.edit("Letters B", second.spec) and second.slug == "letters-b"
    third = draft(owner, "Letters A")
    assert third.slug == "letters-a", "the former address is free"


def test_drafts_are_visible_to_owner_and_staff_only(person, draft, launched_run):
    ada, bob, root = person(), person("bob@example.org"), person("root@example.org", is_staff=True)
    run = draft(ada)
    (public, _) = launched_run(ada, name="Public")
    assert run.may_see(ada) and run.may_see(root) and not run.may_see(bob)
    assert run.may_control(ada) and run.may_control(root) and not run.may_control(bob)
    assert set(Run.objects.visible_to(ada)) == set(Run.objects.visible_to(root)) == {run, public}
    assert list(Run.objects.visible_to(bob)) == [public]


@pytest.mark.django_db(transaction=True)
def test_concurrent_runs_of_one_name_get_different_slugs(person, monkeypatch):
    owner = person()
    slugs = []
    all_have_looked = threading.Barrier(4, timeout=10)
    original_exists = RunQuerySet.exists

    def exists(self) -> bool:
        """Let every thread check that the name is free before any of them uses it."""
        name_exists = original_exists(self)
        all_have_looked.wait()
        return name_exists

    def create_run() -> None:
        try:
            new = NewRun("One name", spec_from_fields(BPE))
            slugs.append(Run.create(User.objects.get(pk=owner.pk), new).slug)
        finally:
            connection.close()

    monkeypatch.setattr(RunQuerySet, "exists", exists)
    threads = [threading.Thread(target=create_run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(slugs)) == 4


def test_run_named_like_an_id_is_found_by_its_slug(person):
    run = Run.create(
        person(), NewRun("01890af7-1111-7222-8333-444455556666", spec_from_fields(BPE))
    )
    assert Run.objects.find(run.slug) == run


def test_edit_of_an_outdated_draft_is_refused(person, draft, manifest, volunteer):
    run = draft(person())
    older = Run.objects.get(pk=run.pk)
    assert run.edit(run.name, spec_from_fields(BYTES))
    assert run.accept_manifest(
        volunteer(run.owner).identity.sign("manifest", manifest(run, tokenizer=None))
    )
    assert not older.edit("Back again", spec_from_fields(BPE))
    run.refresh_from_db()
    assert run.spec.text == TextSpec(tokenizer="bytes") and run.manifest


def test_run_create_with_invalid_terms_raises_all_problems(person):
    policy = JoinPolicy("nobody", -1, 1 << 60, "x" * 30_000)
    with pytest.raises(SpecError) as raised:
        Run.create(person(), NewRun("x", spec_from_fields({}), join_policy=policy))
    assert set(raised.value.problems) == {"access", "min_memory", "min_device_memory", "notes"}
    assert json.dumps(raised.value.problems)


def test_concurrent_extensions_do_not_overwrite_each_other(adas_run):
    run, _ = adas_run
    stale_run = Run.objects.get(pk=run.pk)
    run.extend(1000)
    with pytest.raises(UserError, match="look again"):
        stale_run.extend(500)
    stale_run.extend(500)
    assert Run.objects.get(pk=run.pk).extra_tokens == 1500


def test_every_change_of_a_run_is_audited_once_with_its_actor(adas_run):
    run, machine = adas_run
    run.pause(actor=run.owner)
    run.pause(actor=run.owner)
    run.resume(actor=run.owner)
    run.update_join_policy(JoinPolicy(notes="x"), actor=run.owner)
    run.update_join_policy(JoinPolicy(notes="x"), actor=run.owner)
    run.cancel(actor=run.owner)
    run.archive(actor=run.owner)
    entries = list(
        AuditEntry.objects.filter(subject_kind="run")
        .order_by("id")
        .values_list("action", "actor", "machine")
    )
    owner = run.owner.pk
    assert entries == [
        ("run.create", owner, None),
        ("run.launch", None, None),
        ("run.accept_manifest", None, machine.machine.pk),
        ("run.status_recruiting", None, None),
        ("run.status_training", None, None),
        ("run.pause", owner, None),
        ("run.resume", owner, None),
        ("run.set_join_policy", owner, None),
        ("run.cancel", owner, None),
        ("run.archive", owner, None),
    ]
