"""Test how a command reaches the site of a run, before anything that takes time."""

import json

import pytest
from helpers.worker.fake_coordinator import MACHINE, RUN, FakeCoordinator, enrol
from typer.testing import CliRunner

from barnraise.cli import join, site_access
from barnraise.cli.addresses import RunAddress
from barnraise.cli.main import app
from barnraise.cli.site_options import SiteOptions
from barnraise.errors import CoordinatorError, PlanError, StateError
from barnraise.protocol.coordinator_messages import (
    EnrolmentReply,
    EnrolmentStatus,
    InvitationToken,
    MirrorView,
    Problem,
    RunSummary,
    RunView,
    Shard,
    TextManifest,
)
from barnraise.protocol.enums import RunStatus
from barnraise.protocol.signing import Identity
from barnraise.spec import RunSpec, preset
from barnraise.state_dir import SiteMembership, StateDir


class MeasuredError(Exception):
    """The command got as far as measuring the machine."""


@pytest.fixture
def coordinator():
    """Yield a site that approves every enrolment."""
    site = FakeCoordinator()
    site.routes["POST /enrolments"] = lambda body: EnrolmentReply(
        code="ABCD-EFGH", expires=9e9, poll_every=0.2
    )
    site.routes["GET /enrolments/ABCD-EFGH"] = lambda body: EnrolmentStatus(
        status="approved", machine=MACHINE, person="Ida"
    )
    site.routes["GET /runs/a-run"] = lambda body: run_view(RunStatus.TRAINING)
    yield site
    site.close()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a new state directory; measuring this machine raises `MeasuredError`."""

    def measure(*arguments):
        raise MeasuredError

    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setattr(join, "measure_ranks", measure)
    monkeypatch.setattr(join, "lower_priority", lambda: None)
    return StateDir(tmp_path)


def run_view(status: RunStatus) -> RunView:
    spec = RunSpec(model=preset("gpt-nano")).to_json()
    return RunView(id=RUN, slug="a-run", name="A run", status=status, spec=spec)


def join_run(*arguments: str) -> str:
    """Run `barnraise join` in this process, raise what it raised and return its output."""
    result = CliRunner().invoke(app, ["join", *arguments])
    assert result.exception is not None
    if isinstance(result.exception, MeasuredError):
        return result.output
    raise result.exception


def test_join_by_address_enrols_accepts_the_invitation_and_goes_on(coordinator, home):
    accepted: list[str] = []

    def accept(body: bytes) -> RunSummary:
        accepted.append(InvitationToken.model_validate_json(body).token)
        return RunSummary(id=RUN, name="A run", status=RunStatus.TRAINING)

    coordinator.routes["POST /invitations/accept"] = accept
    output = join_run(f"{coordinator.url}/runs/a-run?invite=abc:d-_e")
    assert "ABCD-EFGH" in output and "now works for Ida" in output
    assert "Joining A run on small" in output
    assert accepted == ["abc:d-_e"] and home.membership.machine == MACHINE
    assert "ABCD-EFGH" not in join_run("a-run"), "it is enrolled"


@pytest.mark.parametrize(
    "url", ["file:///C:/Windows/System32/calc.exe", r"\\\\evil\\x.exe", "https://evil.example/x"]
)
def test_enrolment_opens_a_page_of_the_sites_own_origin_only(coordinator, home, monkeypatch, url):
    opened: list[str] = []
    monkeypatch.setattr(site_access, "open_page", opened.append)
    reply = {"code": "ABCD-EFGH", "url": url, "expires": 9e9, "poll_every": 0.2}
    coordinator.routes["POST /enrolments"] = lambda body: json.dumps(reply).encode()
    output = join_run(f"{coordinator.url}/runs/a-run")
    assert opened == [f"{coordinator.url}/machines/enrol/ABCD-EFGH/"]
    assert opened[0] in output and url not in output


@pytest.mark.parametrize("code", ["\x1b]0;owned\x07", "A/../B", "../x", "A B", "[link=x]A", ""])
def test_enrolment_opens_nothing_for_a_code_that_is_none(coordinator, home, monkeypatch, code):
    opened: list[str] = []
    monkeypatch.setattr(site_access, "open_page", opened.append)
    reply = {"code": code, "expires": 9e9, "poll_every": 0.2}
    coordinator.routes["POST /enrolments"] = lambda body: json.dumps(reply).encode()
    with pytest.raises(CoordinatorError, match="something that is not Barnraise's API"):
        join_run(f"{coordinator.url}/runs/a-run")
    assert not opened and not home.is_enrolled


def test_text_larger_than_the_disk_is_shown_before_the_join(coordinator, home):
    enrol(home, coordinator.url, coordinator.identity.key)
    shard = Shard(digest="0" * 64, tokens=250_000_000)
    manifest = TextManifest(
        run=RUN, vocabulary=256, tokenizer=None, train=[shard] * 10, held_out=[shard]
    )
    view = run_view(RunStatus.TRAINING)
    view = view.model_copy(update={"manifest": home.identity.sign("manifest", manifest)})
    coordinator.routes["GET /runs/a-run"] = lambda body: view
    output = join_run("a-run").replace("\n", " ")
    assert "Joining A run on small; its text takes 5.5 GB of disk" in output


def test_invitation_that_is_refused_ends_the_join(coordinator, home):
    enrol(home, coordinator.url, coordinator.identity.key)
    sentence = "this invitation is wrong, revoked or expired"
    coordinator.routes["POST /invitations/accept"] = lambda body: (404, Problem(error=sentence))
    with pytest.raises(CoordinatorError, match=sentence):
        join_run(f"{coordinator.url}/runs/a-run/invited/abc/")


def test_run_of_another_site_is_refused_with_the_way_out(coordinator, home):
    enrol(home, coordinator.url, coordinator.identity.key)
    other = FakeCoordinator(Identity(b"o" * 32))
    try:
        with pytest.raises(StateError, match=r"is enrolled at .* --home FOLDER"):
            join_run(f"{other.url}/runs/a-run/")
    finally:
        other.close()


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (RunStatus.FINISHED, r"is finished: .*barnraise fetch a-run FOLDER"),
        (RunStatus.CANCELLED, "was cancelled by its owner"),
    ],
)
def test_run_that_is_over_is_refused_before_the_machine_is_measured(
    coordinator, home, status, sentence
):
    enrol(home, coordinator.url, coordinator.identity.key)
    coordinator.routes["GET /runs/a-run"] = lambda body: run_view(status)
    with pytest.raises(CoordinatorError, match=sentence):
        join_run("a-run")


def test_unknown_run_is_refused_before_the_machine_is_measured(coordinator, home):
    enrol(home, coordinator.url, coordinator.identity.key)
    problem = Problem(error="there is no run 'nowhere' here")
    coordinator.routes["GET /runs/nowhere"] = lambda body: (404, problem)
    with pytest.raises(CoordinatorError, match="there is no run 'nowhere' here"):
        join_run("nowhere")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--device", "quantum"), "there is no device 'quantum'"),
        (("--memory", "1MB"), r"(?s)memory 1 MB.*limits --memory auto"),
        (("--disk", "1MB", "--memory", "1MB"), "your limits: memory 1 MB, disk 1 MB"),
    ],
)
def test_request_that_cannot_be_met_is_refused_before_the_measuring(
    coordinator, home, arguments, sentence
):
    enrol(home, coordinator.url, coordinator.identity.key)
    with pytest.raises((StateError, PlanError), match=sentence):
        join_run("a-run", *arguments)


def test_site_that_does_not_answer_is_no_reason_to_refuse(home):
    mirror = MirrorView(key=home.identity.key, name="away", protocols=[1], time=0)
    url = "http://127.0.0.1:9"
    home.save_membership(SiteMembership(url=url, mirror=mirror, machine=MACHINE))
    assert "Joining a-run on away" in join_run("a-run")


def test_limit_of_a_join_that_fails_is_not_saved(coordinator, home):
    enrol(home, coordinator.url, coordinator.identity.key)
    join_run("a-run", "--memory", "100MB")
    assert home.limits.memory is None


def test_logout_forgets_the_site_and_names_the_machine_there(coordinator, home):
    enrol(home, coordinator.url, coordinator.identity.key)
    result = CliRunner().invoke(app, ["logout"])
    assert f"{coordinator.url}/machines/{MACHINE}/" in result.output
    assert not home.is_enrolled
    result = CliRunner().invoke(app, ["logout"])
    assert "not enrolled yet" in str(result.exception)


def test_token_goes_to_no_site_but_the_one_that_was_chosen(coordinator, home, monkeypatch):
    monkeypatch.setenv("BARNRAISE_TOKEN", "brn_secret")
    enrol(home, coordinator.url, coordinator.identity.key)
    elsewhere = RunAddress("a-run", "https://elsewhere.example")
    with pytest.raises(StateError, match="choose with --site"):
        SiteOptions(home=home.path).open_client(elsewhere)
    for options, run in (
        (SiteOptions(home=home.path), RunAddress("a-run", coordinator.url)),
        (SiteOptions(home=home.path, site=f"{coordinator.url}/runs/"), RunAddress("a-run")),
    ):
        client = options.open_client(run)
        assert client.url == coordinator.url
        client.close()
