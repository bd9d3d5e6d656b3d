"""Test copies of runs, the archive, and runs that start from another run's weights."""

import json

import pytest
from django.test import Client
from helpers.site.checkpoint_views import build_checkpoint
from helpers.site.pages import field_error

from barnraise.protocol import coordinator_messages, enums
from barnraise.spec import ModelSpec, RunSpec, Start
from coordinator.accounts.models import Team
from coordinator.runs.drafts import NewRun
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields

pytestmark = pytest.mark.django_db


# ---- copies and the archive


def test_copy_of_a_launched_run_is_an_editable_draft(person, launched_run, signed_in):
    run, _ = launched_run(
        person("owner@example.org"), join_policy=JoinPolicy(min_memory=10**9, notes="hello")
    )
    client, bob = signed_in("bob@example.org")
    answer = client.post(f"/runs/{run.slug}/clone/")
    copy = Run.objects.get(owner=bob)
    assert answer["Location"] == f"/runs/{copy.slug}/edit/" and copy.name == "A run (copy)"
    assert (copy.state, copy.parent, copy.join_policy, copy.manifest) == (
        enums.RunStatus.DRAFT,
        run,
        JoinPolicy(min_memory=10**9),
        None,
    ), "the notes are another person's"
    assert run.clone(run.owner).notes == "hello"
    assert (copy.spec.model, copy.spec.recipe, copy.spec.seed) == (
        run.spec.model,
        run.spec.recipe,
        run.spec.seed,
    )
    assert copy.spec.roots == () and copy.spec.owner == "" and copy.spec.manifest == ""
    assert client.get(answer["Location"]).status_code == 200
    assert not run.edit("Another", run.spec), "a launched run was edited"


def test_copy_of_a_team_run_is_for_the_team_only_if_its_owner_is_in_it(person, draft):
    ada, bob, eve = person(), person("bob@example.org"), person("eve@example.org")
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    policy = JoinPolicy(access="team", team=team.pk, visibility="invited", min_memory=10**9)
    run = draft(ada, join_policy=policy)
    assert run.clone(bob).join_policy == policy
    for_guests = JoinPolicy(access="invitation", visibility="invited", min_memory=10**9)
    assert run.clone(eve).join_policy == for_guests
    team.disband(ada)
    run.refresh_from_db()
    assert run.clone(ada).join_policy == for_guests, "it was not copied at all"


def test_draft_is_copied_by_its_owner_only_and_stays_hidden(signed_in, draft, launched_run):
    _, ada = signed_in()
    secret = draft(ada, name="Secret plans")
    stranger, _ = signed_in("eve@example.org")
    assert stranger.post(f"/runs/{secret.slug}/clone/").status_code == 404
    public, _ = launched_run(ada)
    Run.objects.filter(pk=public.pk).update(parent=secret)
    assert "Secret plans" not in Client().get(f"/runs/{public.slug}/").content.decode()


def test_copy_of_a_run_with_a_long_name_has_a_shortened_name(signed_in, draft):
    client, ada = signed_in()
    client.post(f"/runs/{draft(ada, name='x' * 80).slug}/clone/")
    assert Run.objects.filter(name="x" * 72 + " (copy)").exists()


def test_run_that_is_over_can_be_archived_and_unarchived(signed_in, launched_run):
    client, ada = signed_in()
    run, _ = launched_run(ada)
    assert not run.archive(), "a run in training was archived"
    run.finish()

    def is_listed() -> bool:
        return run.name in client.get("/runs/").content.decode()

    assert is_listed()
    assert client.post(f"/runs/{run.slug}/archive/").status_code == 302 and not is_listed()
    assert client.get(f"/runs/{run.slug}/").status_code == 200, "the archived run has no page"
    assert client.post(f"/runs/{run.slug}/unarchive/").status_code == 302 and is_listed()


# ---- from a checkpoint


@pytest.fixture
def run_with_checkpoint(person, launched_run, numbered_report):
    """Return Ada's run, her machine, and the run's only checkpoint."""
    run, ada = launched_run(person("ada@example.org"), name="Dusk")
    ada.store_reports(run, numbered_report(4, checkpoint=build_checkpoint(tokens=4000)))
    return run, ada, run.checkpoints.get()


def test_run_starts_from_a_checkpoint_once_its_owner_has_the_weights(
    run_with_checkpoint, client, manifest
):
    run, ada, checkpoint = run_with_checkpoint
    client.force_login(run.owner)
    assert "Train on</button>" in client.get(f"/runs/{run.slug}/").content.decode()
    answer = client.post(f"/runs/{run.slug}/clone/", {"checkpoint": str(checkpoint.pk)})
    copy = Run.objects.get(parent=run)
    assert answer["Location"] == f"/runs/{copy.slug}/edit/"
    tokenizer = json.loads(run.manifest["body"])["tokenizer"]
    assert copy.spec.start == Start(str(run.pk), "c" * 64, 4000, tokenizer)
    assert "starts from the weights of" in client.get(answer["Location"]).content.decode()
    copy.launch()
    count = copy.spec.model.layers + 2

    def post_manifest(**changed) -> coordinator_messages.Problem | None:
        answer = ada.post_manifest(copy, manifest(copy, **changed))
        if answer.status_code == 200:
            return None
        return coordinator_messages.Problem.model_validate_json(answer.content)

    assert list(post_manifest(tokenizer=tokenizer).fields) == ["start"]
    assert list(post_manifest(tokenizer="9" * 64, start=["4" * 64] * count).fields) == ["tokenizer"]
    assert post_manifest(tokenizer=tokenizer, start=["4" * 64] * count) is None
    copy.refresh_from_db()
    assert copy.spec_text and copy.spec.start.fragments == ("4" * 64,) * count, (
        "the weights are not in the launched spec"
    )
    assert RunSpec.from_json(copy.spec_text) == copy.spec
    second_copy = copy.clone(run.owner)
    assert second_copy.spec.start == Start(str(run.pk), "c" * 64, 4000, tokenizer), (
        "the second copy starts elsewhere"
    )
    option = f'<option value="{checkpoint.pk}"'
    assert option in client.get("/runs/new/").content.decode()
    run.memberships.update(activity="left")
    assert option not in client.get("/runs/new/").content.decode(), "nobody shares the weights"


def test_run_from_a_checkpoint_keeps_model_and_tokenizer(run_with_checkpoint, client):
    run, _, checkpoint = run_with_checkpoint
    copy = run.clone(run.owner, start=checkpoint.to_start())
    client.force_login(run.owner)
    form = {
        "name": copy.name,
        "preset": "gpt-nano",
        "access": "anyone",
        "recipe.token_budget": "5000",
        "text.tokenizer": "bpe",
    }
    answer = client.post(f"/runs/{copy.slug}/edit/", form | {"model.width": "256"})
    assert answer.status_code == 422
    assert "Must stay 128" in field_error(answer.content.decode(), "model.width")
    answer = client.post(f"/runs/{copy.slug}/edit/", form | {"text.tokenizer": "bytes"})
    assert "Must stay bpe" in field_error(answer.content.decode(), "text.tokenizer")
    assert client.post(f"/runs/{copy.slug}/edit/", form).status_code == 302
    copy.refresh_from_db()
    assert copy.token_budget == 5000 and copy.spec.start == checkpoint.to_start()


def test_clone_from_a_foreign_or_invalid_checkpoint_is_refused(run_with_checkpoint, client, draft):
    run, _, checkpoint = run_with_checkpoint
    client.force_login(run.owner)
    other = draft(run.owner, name="Other")
    for pk in (checkpoint.pk, "nonsense"):
        assert client.post(f"/runs/{other.slug}/clone/", {"checkpoint": str(pk)}).status_code == 404
    assert Run.objects.count() == 2


def test_run_adopts_the_hugging_face_model_that_its_owner_converted(person, manifest, volunteer):
    owner = person()
    fields = {"start.model": "openai-community/gpt2@main", "recipe.token_budget": 100_000}
    run = Run.create(owner, NewRun("Tuned", spec_from_fields(fields)))
    ada = volunteer(owner)
    run.launch()
    shape = {"layers": 2, "width": 64, "heads": 2, "context": 512, "vocabulary": 300}
    good = {"vocabulary": 300, "model": shape, "start": ["4" * 64] * 4}

    def post_manifest(**changed) -> list[str]:
        """Post a manifest with changes; return the fields that are refused."""
        answer = ada.post_manifest(run, manifest(run, **{**good, **changed}))
        if answer.status_code == 200:
            return []
        return list(coordinator_messages.Problem.model_validate_json(answer.content).fields)

    assert post_manifest(model=None) == ["model", "vocabulary", "start"]
    assert post_manifest(start=["4" * 64] * 6) == ["start"]
    assert post_manifest(vocabulary=2048) == ["vocabulary"]
    assert post_manifest(model=shape | {"heads": 3}) == ["model.heads"]
    per_update = run.spec.max_tokens_per_update
    assert post_manifest() == []
    run.refresh_from_db()
    assert RunSpec.from_json(run.spec_text) == run.spec
    assert run.spec.model == ModelSpec(**shape)
    assert run.spec.start == Start(model=fields["start.model"], fragments=("4" * 64,) * 4)
    assert run.spec.max_tokens_per_update == 4 * per_update, "as many rounds, four times as long"
    assert run.clone(owner).spec.start == Start(model=fields["start.model"])


def test_manifest_with_weights_is_refused_if_the_run_starts_from_seed(
    person, draft, manifest, volunteer
):
    run = draft(person())
    ada = volunteer(run.owner)
    answer = ada.post_manifest(run, manifest(run, start=["4" * 64]))
    assert list(coordinator_messages.Problem.model_validate_json(answer.content).fields) == [
        "start"
    ]
