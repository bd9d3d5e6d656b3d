"""Test `barnraise runs …` and `barnraise machines …` against a real site, as scripts use them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from django.utils import timezone
from helpers.wait_for import wait_until
from helpers.worker.command_line import invoke
from helpers.worker.fake_coordinator import enrol

from barnraise.cli.addresses import parse_run_address
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import (
    BarnraiseError,
    CoordinatorError,
    CoordinatorUnreachableError,
    StateError,
)
from barnraise.protocol import reports
from barnraise.protocol.verdicts import Verdict
from barnraise.state_dir import StateDir
from coordinator.accounts.models import Enrolment, Machine
from coordinator.audit.models import AuditEntry
from coordinator.fleet.machine_state import MachinePause
from coordinator.lib import site_identity
from coordinator.runs.models import Run
from coordinator.tokens.models import SCOPES, Token

pytestmark = pytest.mark.django_db(transaction=True)


class CommandLine:
    """Run `barnraise` commands with the token of `owner`, which the environment holds."""

    def __init__(self, owner):
        self.owner = owner

    def __call__(self, *arguments: str):
        """Return the output, parsed if `arguments` have --json; raise what the command raised."""
        output = invoke(*arguments)
        return json.loads(output) if "--json" in arguments else output


@pytest.fixture
def barnraise(live_server, person, monkeypatch, tmp_path, valkey):
    """Return the command line of Ada, with a token that has all scopes."""
    ada = person(name="Ada")
    _, text = Token.create(ada, "script", list(SCOPES), 1)
    monkeypatch.setenv("BARNRAISE_TOKEN", text)
    monkeypatch.setenv("BARNRAISE_SITE", live_server.url)
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    return CommandLine(ada)


def test_cli_creates_shows_changes_and_copies_a_run(barnraise, tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("# Why\n\nFor fun.", "utf-8")
    created = barnraise(
        "runs",
        "create",
        "--name=Night shift",
        "--preset=gpt2-124m",
        "--tokens=1e9",
        "--place=a/stories",
        "--set=recipe.learning_rate=3e-4",
        "--access=invitation",
        "--min-memory=8GB",
        f"--notes={notes}",
        "--launch",
        "--json",
    )
    run = Run.objects.get(pk=created["id"])
    assert run.owner == barnraise.owner and run.launch_requested and run.token_budget == 10**9
    assert (run.spec.text.source, run.spec.text.places) == ("huggingface", ("a/stories",))
    assert run.spec.recipe.learning_rate == 3e-4
    assert run.access == "invitation" and run.min_memory == 8 * 10**9
    assert run.notes.startswith("# Why")
    output = barnraise("runs", "show", run.slug)
    assert "night-shift" in output and "launching" in output and f"/runs/{run.slug}/" in output
    assert "/invited/" in barnraise("runs", "invite", run.slug, "--note", "chess")
    barnraise("runs", "terms", run.slug, "--access", "anyone")
    barnraise("runs", "do", "cancel", run.slug)
    run.refresh_from_db()
    assert (run.access, run.status) == ("anyone", "cancelled")
    copy = barnraise("runs", "copy", run.slug, "--name", "Again", "--json")
    assert Run.objects.get(pk=copy["id"]).parent == run
    assert "None" not in barnraise("runs", "members", run.slug)
    assert "None" not in barnraise("runs", "checkpoints", run.slug)


def test_cli_names_a_launched_run_as_its_pages_do(barnraise, tmp_path, live_server):
    home = StateDir(tmp_path)
    machine = Machine.objects.create(
        key=home.identity.key, owner=barnraise.owner, hostname="pc", confirmed=timezone.now()
    )
    enrol(home, live_server.url, site_identity.identity().key, str(machine.pk))
    for name, options in (("Draft", ()), ("Launched", ("--launch",))):
        barnraise("runs", "create", f"--name={name}", "--place=a/stories", *options)
    states = {row.split()[0]: row.split()[-1] for row in barnraise("runs").splitlines()[1:]}
    assert states == {"draft": "draft", "launched": "launching"}
    assert [run["launching"] for run in barnraise("runs", "--json")] == [True, False]
    assert "launching" in barnraise("runs", "show", "launched")


@pytest.mark.parametrize("path", ["/runs/夜明け/", "/runs/%E5%A4%9C%E6%98%8E%E3%81%91/"])
def test_run_of_any_script_is_found_by_its_address_as_copied(
    barnraise, launched_run, volunteer, person, live_server, path
):
    run, _ = launched_run(barnraise.owner, name="夜明け")
    address = parse_run_address(live_server.url + path)
    assert barnraise("runs", "show", address.name, "--json")["id"] == str(run.pk)
    bob = volunteer(person("bob@example.org"), 2)
    with closing(CoordinatorClient(address.site, bob.identity, bob.mirror_key)) as machine:
        view = machine.fetch_run(address.name)  # it signs the path
        assert (view.id, view.slug) == (str(run.pk), "夜明け")


def test_cli_removes_updates_of_a_machine(
    barnraise, launched_run, volunteer, person, numbered_report
):
    run, _ = launched_run(barnraise.owner, name="Dusk")
    bob = volunteer(person("bob@example.org"), 2)
    bob.join(run)
    bob.store_reports(run, numbered_report(4))
    assert "No updates have been removed" in barnraise("runs", "verdict", "dusk")
    options = ("--from=4", "--update=2:1000", "--reason=noise", "--json")
    issued = barnraise("runs", "verdict", "dusk", "pc-2", *options)
    verdict = Verdict.model_validate_json(issued["body"])
    assert list(verdict.after.values()) == [3] and issued["proven"]
    assert list(verdict.updates.values()) == [{2: 1000}]
    output = barnraise("runs", "verdict", "dusk")
    assert "from 4 on, 2" in output and "noise" in output
    with pytest.raises(CoordinatorError, match="no machines of this run"):
        barnraise("runs", "verdict", "dusk", "pc-3", "--from", "1")
    with pytest.raises(StateError, match="NUMBER or NUMBER:TOKENS"):
        barnraise("runs", "verdict", "dusk", "pc-2", "--update", "x")


def test_cli_shows_a_runs_progress_and_prints_its_history(
    barnraise, launched_run, numbered_report, strangers
):
    run, _ = launched_run(barnraise.owner, name="Dawn")
    (bob,) = strangers(run, 2)
    losses = (("train", 1000, 3.5), ("train", 2000, 3.25), ("validation", 2000, 3.125))
    points = [reports.MeasuredLoss(kind=k, tokens=t, loss=loss) for k, t, loss in losses]
    bob.store_reports(run, numbered_report(1).model_copy(update={"points": points, "rate": 500.0}))
    shown = barnraise("runs", "show", "dawn")
    assert "3.250 training, 3.125 validation" in shown and "at work, 500 tokens/s" in shown
    assert "2,000" in barnraise("runs", "history", "dawn")
    rows = [line.split(",") for line in barnraise("runs", "history", "dawn", "--csv").splitlines()]
    assert rows[0] == ["curve", "tokens", "time", "value"]
    assert [row[3] for row in rows if row[0] == "train"] == ["3.5", "3.25"]
    assert ["validation", "2000", "", "3.125"] in rows
    assert any(row[0] == "rate" and row[1] == "" and row[2].endswith("+00:00") for row in rows)
    draft = barnraise("runs", "create", "--name=Empty", "--json")["slug"]
    assert "No loss has been measured" in barnraise("runs", "history", draft)
    assert "–" in barnraise("runs", "show", draft)


def test_cli_estimates_a_run(barnraise):
    options = ("--preset=gpt2-1.5b", "--volunteers=25", "--tokens=1e10")
    output = barnraise("runs", "estimate", *options)
    assert "12 GB GPU" in output
    assert "25 of them, 15 Mb/s" in " ".join(output.split())
    assert "days" in output
    output = barnraise("runs", "estimate", "--preset", "gpt3-175b")
    assert "may use" in " ".join(output.split()), "the model does not fit"


def test_cli_pauses_resumes_and_renames_machines_by_name(barnraise, volunteer, person):
    ada = volunteer(barnraise.owner)
    volunteer(person("bob@example.org"), 2)
    assert "pc-1" in barnraise("machines") and "pc-2" not in barnraise("machines")
    assert "offline" in barnraise("machines")
    assert "paused" in barnraise("machines", "do", "pause", "pc-1")
    assert "offline, paused" in barnraise("machines")
    assert MachinePause.objects.count() == 1
    barnraise("machines", "rename", "pc-1", "attic [bold]")
    assert "attic [bold]" in barnraise("machines", "do", "resume", str(ada.machine.pk))
    assert not MachinePause.objects.exists()
    with pytest.raises(StateError, match="no machine called 'pc-2'"):
        barnraise("machines", "do", "revoke", "pc-2")


@pytest.fixture
def enrolled(barnraise, live_server, tmp_path, monkeypatch):
    """Return Ada's machine, in whose home the commands run without a token."""
    home = StateDir(tmp_path)
    machine = Machine.objects.create(key=home.identity.key, owner=barnraise.owner, hostname="vm")
    enrol(home, live_server.url, site_identity.identity().key, str(machine.pk))
    monkeypatch.delenv("BARNRAISE_TOKEN")
    monkeypatch.delenv("BARNRAISE_SITE")
    return machine


def test_machine_shows_runs_and_renames_itself_without_a_token(
    barnraise, enrolled, launched_run, draft, person
):
    launched_run(barnraise.owner, name="Dawn")
    assert "Ada" in barnraise("runs", "show", "dawn")
    assert "No loss has been measured" in barnraise("runs", "history", "dawn")
    assert "pc-1" in barnraise("runs", "members", "dawn")
    draft(person("bob@example.org"), name="Secret")
    with pytest.raises(CoordinatorError, match="there is no run 'secret'"):
        barnraise("runs", "show", "secret")
    assert "now called attic." in barnraise("machines", "rename", "attic")
    assert "now called pc-1 2." in barnraise("machines", "rename", "pc-1"), "another one has it"
    with pytest.raises(StateError, match="create a token on the site"):
        barnraise("machines", "rename", "somebody-elses", "mine")
    with pytest.raises(StateError, match="quote what has spaces"):
        barnraise("machines", "rename", "a", "b", "c")
    with pytest.raises(StateError, match="create a token on the site"):
        barnraise("runs", "checkpoints", "dawn")


def test_join_refuses_runs_and_shares_before_it_measures(barnraise, enrolled, launched_run):
    dawn, _ = launched_run(barnraise.owner, name="Dawn")
    dusk, _ = launched_run(barnraise.owner, name="Dusk", seed=7)
    assert dusk.cancel()
    for runs, sentence in (
        (("dawn", "dusk"), "'Dusk' was cancelled by its owner"),
        (("dawn", "dawn"), "'Dawn' is named twice"),
        (("dawn", str(dawn.pk)), "'Dawn' is named twice"),
        (("dawn", "nowhere"), "there is no run 'nowhere'"),
        (("dawn", "dusk", "--share", "70"), "one number for each run"),
        (("dawn", "dusk", "--share", "0,100"), "'0' is no share from 1 to 100"),
    ):
        with pytest.raises(BarnraiseError) as refused:
            barnraise("join", *runs, "--eager")  # a polite one slows the tests' session down
        assert sentence in str(refused.value)
    home = StateDir(Path(os.environ["BARNRAISE_HOME"]))
    assert not (home.path / "runs").exists() and not (home.path / "hardware.json").exists()


def test_second_machine_that_logs_in_by_a_name_gets_a_number(
    barnraise, live_server, volunteer, tmp_path
):
    volunteer(barnraise.owner)  # pc-1
    arguments = ("login", live_server.url, "--name", "pc-1", "--home", str(tmp_path / "second"))
    with ThreadPoolExecutor(1) as pool:
        login = pool.submit(barnraise, *arguments)
        wait_until(lambda: Enrolment.objects.exists() or login.done(), 60)
        Enrolment.objects.get().approve(barnraise.owner)
        output = login.result(60)
    assert "is called pc-1 2 there" in output
    assert {row.split("  ")[0] for row in barnraise("machines").splitlines()[1:]} == {
        "pc-1",
        "pc-1 2",
    }


def test_machine_changes_and_sees_no_other_machine(barnraise, enrolled, volunteer):
    other = volunteer(barnraise.owner).machine
    home = StateDir(Path(os.environ["BARNRAISE_HOME"]))
    with closing(CoordinatorClient.from_state_dir(home)) as site:
        for method, path in (("GET", ()), ("PATCH", ()), ("POST", ("actions", "revoke"))):
            with pytest.raises(CoordinatorError, match="itself alone"):
                site.request_json(method, "machines", str(other.pk), *path, body={"name": "x"})
        with pytest.raises(CoordinatorError, match="barnraise pause"):
            site.request_json("POST", "machines", str(enrolled.pk), "actions", "pause")
        site.request_json("POST", "machines", str(enrolled.pk), "actions", "revoke")
    enrolled.refresh_from_db()
    assert enrolled.revoked and AuditEntry.objects.filter(action="machine.revoke").count() == 1


def test_cli_shows_the_sites_errors_with_their_fields(barnraise):
    with pytest.raises(CoordinatorError, match=r"model\.heads: the width"):
        barnraise("runs", "create", "--name", "x", "--set", "model.heads=5")
    with pytest.raises(CoordinatorError) as refused:
        barnraise("runs", "create", "--name", "x", "--tokens", "-5")
    assert str(refused.value).count("recipe.token_budget") == 1
    with pytest.raises(CoordinatorError, match="there is no run 'nowhere'"):
        barnraise("runs", "show", "nowhere")
    with pytest.raises(StateError, match="names no run"):
        barnraise("runs", "show", "../me")
    with pytest.raises(StateError, match="FIELD=VALUE"):
        barnraise("runs", "create", "--name", "x", "--set", "nonsense")


def test_cli_without_token_or_site_explains_what_to_do(barnraise, monkeypatch):
    monkeypatch.setenv("BARNRAISE_SITE", "http://127.0.0.1:9")
    with pytest.raises(CoordinatorUnreachableError, match="does not answer"):
        barnraise("machines")
    monkeypatch.setenv("BARNRAISE_TOKEN", "brn_\n")
    with pytest.raises((CoordinatorUnreachableError, StateError)):
        barnraise("machines")
    monkeypatch.delenv("BARNRAISE_TOKEN")
    with pytest.raises(StateError, match="create a token on the site"):
        barnraise("machines")
