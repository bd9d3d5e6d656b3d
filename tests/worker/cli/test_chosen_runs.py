"""Test which runs `barnraise join` trains, and what it refuses."""

import pytest
from helpers.worker.command_line import invoke
from helpers.worker.fake_coordinator import RUN, FakeCoordinator, enrol
from helpers.worker.other_worker import other_worker
from typer.testing import CliRunner

from barnraise.cli import join
from barnraise.cli.chosen_runs import choose_next, find_next_run, parse_shares
from barnraise.cli.main import app
from barnraise.errors import RunEndedError, StateError
from barnraise.protocol.coordinator_messages import RunPage, RunSummary, RunView
from barnraise.protocol.enums import RunStatus
from barnraise.spec import RunSpec, preset
from barnraise.state_dir import StateDir

OTHER = RUN[:-1] + "2"


class MeasuredError(Exception):
    """The command got as far as measuring the machine."""


def summary(run: str, status: RunStatus) -> RunSummary:
    return RunSummary(id=run, name=run[-1], status=status)


@pytest.fixture
def site():
    """Yield a site with the runs a-run, which trains, and b-run, which is `site.b_status`."""
    coordinator = FakeCoordinator()
    coordinator.b_status = RunStatus.TRAINING
    spec = RunSpec(model=preset("gpt-nano")).to_json()

    def view(run: str, slug: str, status: RunStatus) -> RunView:
        return RunView(id=run, slug=slug, name=slug.title(), status=status, spec=spec)

    def view_a(body: bytes) -> RunView:
        return view(RUN, "a-run", RunStatus.TRAINING)

    def view_b(body: bytes) -> RunView:
        return view(OTHER, "b-run", coordinator.b_status)

    coordinator.routes |= {
        "GET /runs/a-run": view_a,
        f"GET /runs/{RUN}": view_a,
        "GET /runs/b-run": view_b,
        f"GET /runs/{OTHER}": view_b,
    }
    yield coordinator
    coordinator.close()


@pytest.fixture
def home(tmp_path, monkeypatch, site):
    """Return the home of an enrolled machine; measuring it raises `MeasuredError`."""

    def measure(*arguments):
        raise MeasuredError

    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(join, "measure_ranks", measure)
    monkeypatch.setattr(join, "lower_priority", lambda: None)
    state_dir = StateDir(tmp_path)
    enrol(state_dir, site.url, site.identity.key)
    return state_dir


def test_shares_are_read_in_the_order_of_the_runs():
    assert parse_shares("", 3) == [1.0, 1.0, 1.0]
    assert parse_shares("70,30", 2) == parse_shares(" 70, 30 ", 2) == [70.0, 30.0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("70", "one number for each run (runs named: 2)"),
        ("70,20,10", "runs named: 2"),
        ("0,100", "'0' is no share from 1 to 100"),
        ("-1,50", "'-1' is no share"),
        ("a,b", "'a' is no share"),
        ("70,", "'' is no share"),
        ("101,1", "'101' is no share"),
        ("²,1", "'²' is no share"),
    ],
)
def test_shares_that_make_no_sense_are_refused_with_an_example(text, sentence):
    with pytest.raises(StateError, match=r"--share 70,30") as refused:
        parse_shares(text, 2)
    assert sentence in str(refused.value)


def test_share_of_a_single_run_is_refused(home):
    with pytest.raises(StateError, match="runs named: 1"):
        invoke("join", "a-run", "--share", "70,30")


def test_two_runs_are_announced_before_the_machine_is_measured(home):
    result = CliRunner().invoke(app, ["join", "a-run", "b-run", "--share", "70,30"])
    assert isinstance(result.exception, MeasuredError), result.output
    assert "Joining A-Run on small" in result.output and "Joining B-Run" in result.output


def test_run_named_twice_is_refused_also_by_its_id(home):
    for again in ("a-run", RUN):
        with pytest.raises(StateError, match="'A-Run' is named twice"):
            invoke("join", "a-run", again)


def test_ended_run_among_two_is_refused_unless_the_next_follows(home, site):
    site.b_status = RunStatus.FINISHED
    with pytest.raises(RunEndedError, match="'B-Run' is finished"):
        invoke("join", "a-run", "b-run")
    result = CliRunner().invoke(app, ["join", "a-run", "b-run", "--next"])
    assert isinstance(result.exception, MeasuredError), result.output
    assert "A-Run" in result.output and "B-Run" not in result.output


def test_second_worker_is_refused_with_the_process_and_the_way_out(home):
    folder = home.open_run(RUN)
    folder.close()
    with other_worker(folder.path) as pid:
        for run in ("a-run", "b-run"):  # also one that the first worker does not train
            with pytest.raises(StateError, match=rf"process {pid} trains .*barnraise status"):
                invoke("join", run)
        assert "waits for its turn" in invoke("status")
    result = CliRunner().invoke(app, ["join", "a-run"])
    assert isinstance(result.exception, MeasuredError), "the process is gone"


def test_run_is_trained_while_another_is_served(home):
    folder = home.open_run(RUN)
    folder.close()
    with other_worker(folder.path, trains=False) as pid:
        result = CliRunner().invoke(app, ["join", "b-run"])
        assert isinstance(result.exception, MeasuredError), result.output
        with pytest.raises(StateError, match=rf"process {pid} serves on this machine"):
            invoke("logout")


def test_next_run_is_one_that_trains_before_one_that_waits():
    launched = summary(RUN[:-1] + "4", RunStatus.DRAFT).model_copy(update={"launching": True})
    runs = [
        summary(RUN, RunStatus.DRAFT),
        launched,
        summary(OTHER, RunStatus.RECRUITING),
        summary(RUN[:-1] + "3", RunStatus.TRAINING),
    ]
    assert choose_next(runs, ()).id.endswith("3")
    assert choose_next(runs, (RUN[:-1] + "3",)).id == OTHER
    assert choose_next(runs, (RUN[:-1] + "3", OTHER)) is launched
    assert choose_next(runs, (RUN[:-1] + "3", OTHER, launched.id)) is None


def test_next_run_is_looked_for_at_the_machines_site(home, site):
    pages = iter(
        [
            RunPage(runs=[summary(RUN, RunStatus.TRAINING)], next=RUN),
            RunPage(runs=[summary(OTHER, RunStatus.TRAINING)]),
        ]
    )
    site.routes["GET /runs"] = site.routes[f"GET /runs?after={RUN}"] = lambda body: next(pages)
    found = find_next_run(home, [RUN])
    assert (found.id, found.address) == (OTHER, "b-run")
