"""`barnraise runs …` and `barnraise machines …` against a real site: what an organiser and a volunteer would script."""

import json

import pytest
from typer.testing import CliRunner

from barnraise.cli.main import app
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError, StateError
from barnraise.protocol.verdicts import Verdict
from coordinator.fleet.machine_state import MachinePause
from coordinator.runs.models import Run
from coordinator.telemetry.rollup import drain_queue
from coordinator.tokens.models import SCOPES, Token

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def barnraise(live_server, person, monkeypatch, tmp_path, valkey):
    """Runs a command as its owner; what it printed, with --json as JSON. Raises what the command raised."""
    ada = person(name="Ada")
    _, text = Token.create(ada, "script", list(SCOPES), 1)
    monkeypatch.setenv("BARNRAISE_TOKEN", text)
    monkeypatch.setenv("BARNRAISE_SITE", live_server.url)
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str):
        done = CliRunner().invoke(app, list(words), catch_exceptions=True)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout) if "--json" in words else done.stdout

    run.owner = ada
    return run


def test_a_script_creates_a_run_looks_at_it_and_moves_it_through_its_life(barnraise, tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("# Why\n\nFor fun.", "utf-8")
    made = barnraise(
        "runs", "create", "--name", "Night shift", "--preset", "gpt2-124m", "--tokens", "1e9", "--place", "a/stories",
        "--set", "recipe.learning_rate=3e-4", "--access", "invitation", "--least-memory", "8GB", "--notes", str(notes),
        "--launch", "--json",
    )  # fmt: skip
    run = Run.objects.get(pk=made["id"])
    assert run.owner == barnraise.owner and run.launch_requested and run.token_budget == 10**9
    assert (run.spec.text.source, run.spec.text.places) == ("huggingface", ("a/stories",))
    assert (
        run.spec.recipe.learning_rate == 3e-4
        and run.access == "invitation"
        and run.least_memory == 8 * 10**9
    )
    assert run.notes.startswith("# Why")
    said = barnraise("runs", "show", run.slug)
    assert "night-shift" in said and "launching" in said and f"/runs/{run.slug}/" in said
    assert "/invited/" in barnraise("runs", "invite", run.slug, "--note", "chess")
    barnraise("runs", "terms", run.slug, "--access", "anyone")
    barnraise("runs", "do", "cancel", run.slug)
    run.refresh_from_db()
    assert (run.access, run.status) == ("anyone", "cancelled")
    copy = barnraise("runs", "copy", run.slug, "--name", "Again", "--json")
    assert Run.objects.get(pk=copy["id"]).parent == run
    assert "None" not in barnraise("runs", "members", run.slug) + barnraise(
        "runs", "checkpoints", run.slug
    )


def test_a_script_takes_a_machines_updates_out(
    barnraise, launched_run, volunteer, person, numbered_report
):
    run, _ = launched_run(barnraise.owner, name="Dusk")
    bob = volunteer(person("bob@example.org"), 2)
    bob.join(run)
    bob.report(run, numbered_report(4))
    drain_queue()
    assert "Nothing was taken out" in barnraise("runs", "verdict", "dusk")
    what = ("--from", "4", "--update", "2:1000", "--reason", "noise")
    made = barnraise("runs", "verdict", "dusk", "pc-2", *what, "--json")
    said = Verdict.model_validate_json(made["body"])
    assert (
        list(said.after.values()) == [3]
        and list(said.updates.values()) == [{2: 1000}]
        and made["proven"]
    )
    told = barnraise("runs", "verdict", "dusk")
    assert "from 4 on, 2" in told and "noise" in told
    with pytest.raises(CoordinatorError, match="no machines of this run"):
        barnraise("runs", "verdict", "dusk", "pc-3", "--from", "1")
    with pytest.raises(StateError, match="NUMBER or NUMBER:TOKENS"):
        barnraise("runs", "verdict", "dusk", "pc-2", "--update", "x")


def test_a_script_asks_what_a_run_would_take(barnraise):
    said = barnraise(
        "runs", "estimate", "--preset", "gpt2-1.5b", "--volunteers", "25", "--tokens", "1e10"
    )
    assert "12 GB GPU" in said and "25 of them, 20 Mb/s" in said and "days" in said
    refused = " ".join(barnraise("runs", "estimate", "--preset", "gpt3-175b").split())
    assert "may use" in refused


def test_a_script_pauses_resumes_and_renames_a_machine_by_its_name(barnraise, volunteer, person):
    ada = volunteer(barnraise.owner)
    volunteer(person("bob@example.org"), 2)
    assert "pc-1" in barnraise("machines") and "pc-2" not in barnraise("machines")
    assert (
        "paused" in barnraise("machines", "do", "pause", "pc-1")
        and MachinePause.objects.count() == 1
    )
    barnraise("machines", "rename", "pc-1", "attic [bold]")
    assert (
        "attic [bold]" in barnraise("machines", "do", "resume", str(ada.machine.pk))
        and not MachinePause.objects.exists()
    )
    with pytest.raises(StateError, match="no machine called 'pc-2'"):
        barnraise("machines", "do", "revoke", "pc-2")


def test_what_the_site_refuses_is_said_with_its_fields(barnraise):
    with pytest.raises(CoordinatorError, match=r"model\.heads: the width"):
        barnraise("runs", "create", "--name", "x", "--set", "model.heads=5")
    with pytest.raises(CoordinatorError, match="there is no run 'nowhere'"):
        barnraise("runs", "show", "nowhere")
    with pytest.raises(CoordinatorError, match="There is nothing at this address"):
        barnraise("runs", "show", "../me")
    with pytest.raises(StateError, match="FIELD=VALUE"):
        barnraise("runs", "create", "--name", "x", "--set", "nonsense")


def test_without_a_token_or_a_site_it_says_what_to_do(barnraise, monkeypatch):
    monkeypatch.setenv("BARNRAISE_SITE", "http://127.0.0.1:9")
    with pytest.raises(CoordinatorUnreachableError, match="does not answer"):
        barnraise("machines")
    monkeypatch.setenv("BARNRAISE_TOKEN", "brn_\n")
    with pytest.raises((CoordinatorUnreachableError, StateError)):
        barnraise("machines")
    monkeypatch.delenv("BARNRAISE_TOKEN")
    with pytest.raises(StateError, match="create a token on the site"):
        barnraise("machines")
