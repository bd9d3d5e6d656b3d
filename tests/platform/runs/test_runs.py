"""Test runs: launch, decisions, drafts, names, spec fields and management commands."""

import json
import threading

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import SpecError
from barnraise.protocol import coordinator_messages, enums, messages
from barnraise.protocol.signing import digest
from barnraise.spec import PRESETS, RunSpec, preset
from coordinator.accounts.models import User
from coordinator.api import worker_endpoints
from coordinator.eventlog.projection import current_state
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.lib import site_identity
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields

Status = enums.RunStatus


def test_launched_run_stays_a_draft_until_its_manifest_is_posted(
    person, draft, manifest, volunteer
):
    run = draft(person())
    assert run.launch() and not run.launch()
    assert not advance_run(run) and run.state is Status.DRAFT
    signed = volunteer(run.owner).identity.sign("manifest", manifest(run))
    assert run.accept_manifest(signed)
    assert advance_run(run) and run.state is Status.RECRUITING


def test_launch_fixes_mirror_owner_and_text_in_the_spec(person, launched_run):
    run, owner = launched_run(person())
    spec = RunSpec.from_json(run.spec_text)
    assert spec.roots == (site_identity.identity().key,)
    assert spec.owner == owner.identity.key
    assert spec.manifest == digest(run.manifest["body"])
    assert run.spec_digest == digest(run.spec_text)
    assert not run.edit("Another", spec) and run.name == "A run"
    assert not run.accept_manifest(messages.Signed.model_validate(run.manifest))


def test_join_during_the_launch_returns_one_consistent_run(person, launched_run, monkeypatch):
    """Read the run before its launch; a machine refuses a ticket that does not match the run."""
    run, ada = launched_run(person())
    get_visible_run = worker_endpoints.get_visible_run

    def read_before_the_launch(*arguments):
        draft_run = get_visible_run(*arguments)
        draft_run.spec_text = ""
        draft_run.manifest = None
        draft_run.status = enums.RunStatus.DRAFT
        return draft_run

    monkeypatch.setattr(worker_endpoints, "get_visible_run", read_before_the_launch)
    answer = ada.send_request(
        "POST",
        f"/runs/{run.slug}/join",
        coordinator_messages.JoinRequest(addresses=[], version="1"),
    )
    reply = coordinator_messages.JoinReply.model_validate_json(answer.content)
    assert reply.ticket and reply.run.manifest
    assert digest(reply.run.manifest.body) == RunSpec.from_json(reply.run.spec).manifest


def test_pause_and_resume_return_whether_the_status_changed(person, launched_run):
    run, _ = launched_run(person())
    assert not run.resume()
    assert run.pause() and run.state is Status.PAUSED
    assert not run.pause() and not advance_run(run)
    assert run.resume() and run.state is Status.TRAINING
    assert run.finish() and run.finished and run.is_over
    assert not run.cancel() and not run.pause() and run.state is Status.FINISHED


def test_stale_run_object_cannot_undo_a_decision(person, launched_run):
    run, _ = launched_run(person())
    stale = Run.objects.get(pk=run.pk)
    assert run.cancel()
    assert not stale.pause() and stale.state is Status.CANCELLED


@pytest.mark.django_db(transaction=True)
def test_one_of_two_concurrent_decisions_succeeds(person, launched_run):
    run, _ = launched_run(person())
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


def test_edited_text_of_a_draft_removes_its_manifest(person, draft, manifest, volunteer):
    run = draft(person())
    run.accept_manifest(volunteer(run.owner).identity.sign("manifest", manifest(run)))
    assert run.edit("Renamed", run.spec) and run.manifest
    assert (
        run.edit("Renamed", spec_from_fields({"text.tokenizer": "bytes"})) and run.manifest is None
    )
    assert run.spec.model.vocabulary == 256


def test_text_of_a_draft_can_be_prepared_again(person, draft, manifest, volunteer):
    run = draft(person())
    ada = volunteer(run.owner)
    first = ada.identity.sign("manifest", manifest(run))
    path = f"/runs/{run.slug}/manifest"
    assert ada.send_request("DELETE", path).status_code == 200, "nothing to discard is no error"
    assert ada.send_request("POST", path, first).status_code == 200
    another = ada.identity.sign("manifest", manifest(run, vocabulary=1024))
    assert ada.send_request("POST", path, another).status_code == 409
    assert ada.send_request("DELETE", path).status_code == 200
    assert ada.send_request("POST", path, another).status_code == 200
    run.refresh_from_db()
    assert run.manifest["body"] == another.body
    state = current_state(f"run:{run.pk}")
    assert state["manifest"]["body"] == another.body, "other mirrors see the newer one, too"


def test_text_of_a_launched_run_cannot_be_discarded(person, launched_run):
    run, owner = launched_run(person())
    refused = owner.send_request("DELETE", f"/runs/{run.slug}/manifest")
    assert refused.status_code == 409 and "copy the run" in refused.content.decode()
    run.refresh_from_db()
    assert run.manifest is not None


def test_runs_of_the_same_name_get_different_slugs(person, draft):
    owner = person()
    first, second = draft(owner, "Même  nom!"), draft(owner, "Même nom!")
    assert first.slug == "meme-nom" and second.slug.startswith("meme-nom-")
    assert Run.objects.find(second.slug) == Run.objects.find(str(second.pk)) == second
    assert Run.objects.find("\0") is None and Run.objects.find("x" * 500) is None


def test_renamed_draft_gets_the_address_of_its_name(person, draft):
    owner = person()
    first, second = draft(owner, "Letters A"), draft(owner, "Letters B")
    assert second.edit("Letters A", second.spec)
    assert second.slug == f"letters-a-{second.pk.hex[-8:]}"
    assert first.edit("Runes", first.spec) and first.slug == "runes"
    assert second.edit("Letters B", second.spec) and second.slug == "letters-b"
    third = draft(owner, "Letters A")
    assert third.slug == "letters-a", "the former address is free"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model.layers": 0}, "model.layers"),
        ({"model.width": "100", "model.heads": "3"}, "model.heads"),
        ({"model.context": 1 << 30}, "model.context"),
        ({"text.source": "the internet"}, "text.source"),
        ({"recipe.token_budget": -5}, "recipe.token_budget"),
        ({"recipe.learning_rate": "nan"}, "recipe.learning_rate"),
        ({"recipe.learning_rate": "inf"}, "recipe.learning_rate"),
        ({"recipe.learning_rate": "quick"}, "recipe.learning_rate"),
        ({"model.layers": "2.5"}, "model.layers"),
        ({"model.layers": "1e999"}, "model.layers"),
        ({"model.colour": "red"}, "model.colour"),
    ],
)
def test_invalid_value_is_refused_at_its_field(fields, field):
    with pytest.raises(SpecError) as refused:
        spec_from_fields(fields)
    assert field in refused.value.problems
    assert all(sentence for sentence in refused.value.problems.values())


@given(
    st.dictionaries(
        st.sampled_from(["model.layers", "recipe.clip", "seed", "text.held_out", "x"]), st.text()
    )
)
def test_any_form_input_gives_a_spec_or_problems(fields):
    try:
        spec = spec_from_fields(fields)
    except SpecError as refused:
        assert refused.problems
    else:
        assert RunSpec.from_json(spec.to_json()) == spec


def test_numbers_with_separators_and_suffixes_are_parsed():
    spec = spec_from_fields(
        {"recipe.token_budget": "1e6", "recipe.learning_rate": "3e-4", "model.layers": " 1_2 "}
    )
    assert (spec.recipe.token_budget, spec.recipe.learning_rate, spec.model.layers) == (
        1_000_000,
        3e-4,
        12,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_run(name):
    assert spec_from_fields({}, name).model == preset(name)


def test_run_without_a_name_is_refused(person, draft):
    owner = person()
    for name in ("  ", "x" * 81):
        with pytest.raises(SpecError) as refused:
            draft(owner, name)
        assert "name" in refused.value.problems


def test_drafts_are_visible_to_owner_and_staff_only(person, draft, launched_run):
    ada, bob, root = person(), person("bob@example.org"), person("root@example.org", is_staff=True)
    run = draft(ada)
    (public, _) = launched_run(ada, name="Public")
    assert run.may_see(ada) and run.may_see(root) and not run.may_see(bob)
    assert run.may_control(ada) and run.may_control(root) and not run.may_control(bob)
    assert set(Run.objects.visible_to(ada)) == set(Run.objects.visible_to(root)) == {run, public}
    assert list(Run.objects.visible_to(bob)) == [public]


def test_management_commands_create_an_owner_and_a_run(db, capsys):
    for _ in range(2):
        call_command("prepare_owner", email="Owner@Example.org", password="wooden-barn-9")
    owner = User.objects.get(email="owner@example.org")
    assert owner.check_password("wooden-barn-9")
    assert owner.emailaddress_set.get().verified
    capsys.readouterr()
    fields = ["recipe.learning_rate=2e-3", "model.layers=2"]
    call_command(
        "create_run",
        owner="OWNER@example.org",
        name="Barn",
        tokens="300000",
        fields=fields,
        launch=True,
    )
    run = Run.objects.get(pk=capsys.readouterr().out.strip())
    assert run.launch_requested and run.spec.recipe.token_budget == 300_000
    assert (run.spec.recipe.learning_rate, run.spec.model.layers) == (2e-3, 2)
    with pytest.raises(CommandError, match=r"model\.layers"):
        call_command(
            "create_run", owner="owner@example.org", name="Barn", fields=["model.layers=0"]
        )
    with pytest.raises(CommandError, match="nobody"):
        call_command("create_run", owner="x@example.org", name="Barn")
    assert json.loads(run.spec.to_json())["model"]["layers"] == 2


def test_max_tokens_per_update_defaults_to_sixteen_rounds():
    from coordinator.runs.spec_form import spec_from_fields

    spec = spec_from_fields({"recipe.round_steps": "20"})
    assert spec.max_tokens_per_update == 16 * 20 * spec.recipe.step_sequences * spec.model.context
    assert spec_from_fields({"max_tokens_per_update": "500_000"}).max_tokens_per_update == 500_000
