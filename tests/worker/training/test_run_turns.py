"""Test how a worker divides its time among several runs."""

import math
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.errors import CoordinatorUnreachableError, StateError
from barnraise.protocol.enums import Activity
from barnraise.training import run_turns
from barnraise.training.run_turns import CYCLE_SECONDS, PlannedTurn, Turn, TurnPlanner


@settings(deadline=None, max_examples=50)
@given(
    shares=st.lists(st.integers(1, 100), min_size=2, max_size=5),
    rounds=st.lists(st.floats(1.0, 4000.0), min_size=5, max_size=5),
)
def test_shares_hold_to_a_turn_and_a_round_of_each_run(shares, rounds):
    planner = TurnPlanner({str(index): share for index, share in enumerate(shares)})
    spent = [0.0] * len(shares)
    for _ in range(300):
        planned = planner.plan_turn(0.0)
        index = int(planned.run)
        # A turn ends with the round in which its time is over.
        seconds = math.ceil(planned.seconds / rounds[index]) * rounds[index]
        planner.record_turn(planned.run, seconds)
        spent[index] += seconds
    largest = max(
        (CYCLE_SECONDS * share / sum(shares) + length) / share
        for share, length in zip(shares, rounds, strict=False)
    )
    served = [seconds / share for seconds, share in zip(spent, shares, strict=True)]
    assert max(served) - min(served) <= largest + 1e-6


def test_run_that_ends_hands_its_share_on():
    planner = TurnPlanner({"a": 70, "b": 30})
    assert planner.plan_turn(0.0) == PlannedTurn("a", 0.7 * CYCLE_SECONDS, run_turns.WAIT_SECONDS)
    planner.record_turn("a", 2520.0)
    planner.remove("a")
    assert planner.plan_turn(0.0) == PlannedTurn("b", math.inf, math.inf)
    planner.remove("b")
    assert planner.plan_turn(0.0) is None


def test_run_that_waits_passes_its_turn_on_and_is_owed_nothing():
    planner = TurnPlanner({"a": 1, "b": 1})
    planner.record_wait("a", 0.0)
    for _ in range(5):
        assert planner.plan_turn(10.0).run == "b"
        planner.record_turn("b", 1800.0)
    later = run_turns.RETRY_SECONDS + 1
    assert planner.plan_turn(later).run == "a"
    planner.record_turn("a", 1800.0)
    planner.record_turn("a", 9000.0)
    assert planner.plan_turn(later).run == "b"


def test_while_all_runs_wait_each_waits_until_another_may_be_ready():
    planner = TurnPlanner({"a": 1, "b": 1})
    planner.record_wait("a", 0.0)
    planner.record_wait("b", 60.0)
    planned = planner.plan_turn(61.0)
    assert planned.run == "a" and planned.patience == pytest.approx(run_turns.RETRY_SECONDS - 1)


def status(activity: Activity) -> SimpleNamespace:
    return SimpleNamespace(activity=activity)


def test_turn_ends_between_two_rounds_and_not_before():
    turn = Turn(PlannedTurn("a", 0.0, 60.0), threading.Event())
    turn.observe(status(Activity.PREPARING))
    assert not turn.end_with_round(), "it has not trained a round"
    turn.observe(status(Activity.TRAINING))
    assert not turn.leaving.wait(0.6), "a round is under way"
    assert turn.end_with_round() and turn.leaving.is_set() and turn.is_passed_on
    turn.close()


@pytest.mark.parametrize("activity", [None, Activity.PAUSED, Activity.SUSPENDED])
def test_turn_of_a_run_that_waits_is_passed_on(activity):
    turn = Turn(PlannedTurn("a", 60.0, 0.3), threading.Event())
    if activity is not None:
        turn.observe(status(activity))
    assert turn.leaving.wait(10) and turn.has_waited
    turn.close()


def test_only_run_waits_as_long_as_it_takes():
    turn = Turn(PlannedTurn("a", math.inf, math.inf), threading.Event())
    turn.observe(status(Activity.PAUSED))
    assert not turn.leaving.wait(0.6) and not turn.end_with_round()
    turn.close()


def test_run_that_does_not_begin_to_train_passes_its_turn_on(monkeypatch):
    monkeypatch.setattr(run_turns, "PREPARE_SECONDS", 0.5)
    turn = Turn(PlannedTurn("a", 0.1, 60.0), threading.Event())
    turn.observe(status(Activity.PREPARING))
    assert not turn.leaving.wait(0.3), "its own time begins with the training"
    assert turn.leaving.wait(10) and turn.has_waited
    turn.close()


@pytest.fixture
def quick_cycle(monkeypatch):
    monkeypatch.setattr(run_turns, "CYCLE_SECONDS", 1.0)


def train_rounds(turn: Turn, rounds: int) -> bool:
    """Train rounds of 50 ms; return whether the run ended, and not its turn."""
    turn.observe(status(Activity.TRAINING))
    for _ in range(rounds):
        if turn.end_with_round() or turn.leaving.is_set():
            return False
        time.sleep(0.05)
    return True


def test_runs_are_trained_in_turns_until_all_have_ended(quick_cycle):
    left, order = {"a": 40, "b": 8}, []

    def train(run: str, turn: Turn) -> None:
        order.append(run)
        before = time.monotonic()
        train_rounds(turn, left[run])
        left[run] -= round((time.monotonic() - before) / 0.05)

    assert run_turns.train_in_turns({"a": 70, "b": 30}, threading.Event(), train)
    assert order[:2] == ["a", "b"] and order.count("a") > 1 and order[-1] == "a"


def test_stop_ends_the_turn_and_the_worker(quick_cycle):
    stop = threading.Event()

    def train(run: str, turn: Turn) -> None:
        stop.set()
        assert turn.leaving.wait(10)

    assert not run_turns.train_in_turns({"a": 1, "b": 1}, stop, train)


def test_stop_of_one_run_by_a_person_ends_the_worker(quick_cycle):
    trained = []

    def train(run: str, turn: Turn) -> None:
        trained.append(run)
        turn.leaving.set()  # as `barnraise stop` does through the run's folder

    assert not run_turns.train_in_turns({"a": 1, "b": 1}, threading.Event(), train)
    assert trained == ["a"]


def test_run_that_cannot_be_trained_is_left_out_and_the_last_one_raises(quick_cycle, caplog):
    trained = []

    def train(run: str, turn: Turn) -> None:
        trained.append(run)
        if run == "a":
            raise StateError("no room for 'a'")
        if trained.count("b") == 1:
            raise CoordinatorUnreachableError("no site")
        raise StateError("no room for 'b'")

    with pytest.raises(StateError, match="no room for 'b'"):
        run_turns.train_in_turns({"a": 1, "b": 1, "c": 1}, threading.Event(), skip_c(train))
    assert "no room for 'a'" in caplog.text and trained.count("a") == 1


def skip_c(train):
    """Let the run "c" end at once."""
    return lambda run, turn: None if run == "c" else train(run, turn)
