"""Test how a worker divides its time among several runs."""

import math
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.errors import CoordinatorUnreachableError, StateError
from barnraise.protocol.enums import Activity, PauseReason
from barnraise.protocol.reports import NO_FIGURES, PauseView
from barnraise.training import run_turns
from barnraise.training.local_status import LocalStatus
from barnraise.training.run_turns import CYCLE_SECONDS, Turn, plan_turn


@settings(deadline=None, max_examples=50)
@given(
    shares=st.lists(st.integers(1, 100), min_size=2, max_size=5),
    rounds=st.lists(st.floats(1.0, 4000.0), min_size=5, max_size=5),
)
def test_shares_hold_to_a_turn_and_a_round_of_each_run(shares, rounds):
    by_run = {str(index): float(share) for index, share in enumerate(shares)}
    served = dict.fromkeys(by_run, 0.0)
    for _ in range(300):
        run, planned = plan_turn(by_run, served)
        length = rounds[int(run)]
        # A turn ends with the round in which its time is over.
        served[run] += math.ceil(planned / length) * length / by_run[run]
    largest = max(
        (CYCLE_SECONDS * share / sum(shares) + length) / share
        for share, length in zip(shares, rounds, strict=False)
    )
    assert max(served.values()) - min(served.values()) <= largest + 1e-6


def test_run_that_ends_hands_its_share_on():
    served = {"a": 0.0, "b": 0.0}
    assert plan_turn({"a": 70, "b": 30}, served) == ("a", 0.7 * CYCLE_SECONDS)
    assert plan_turn({"b": 30}, served) == ("b", math.inf)


def status(activity: Activity, reason: PauseReason | None = None) -> LocalStatus:
    pause = None if reason is None else PauseView(reason=reason)
    return LocalStatus(**dict(NO_FIGURES) | {"activity": activity, "pause": pause})


def test_turn_ends_between_two_rounds_and_not_before():
    turn = Turn(0.0, threading.Event())
    turn.observe(status(Activity.PREPARING))
    assert not turn.end_with_round(), "it has not trained a round"
    turn.observe(status(Activity.TRAINING))
    assert not turn.leaving.wait(0.6), "a round is under way"
    assert turn.end_with_round() and turn.leaving.is_set() and turn.is_passed_on
    turn.close()


@pytest.mark.parametrize("activity", [None, Activity.PAUSED, Activity.SUSPENDED])
def test_turn_of_a_run_that_waits_is_passed_on(monkeypatch, activity):
    monkeypatch.setattr(run_turns, "WAIT_SECONDS", 0.3)
    turn = Turn(60.0, threading.Event())
    if activity is not None:
        turn.observe(status(activity, PauseReason.RUN))
    assert turn.leaving.wait(10) and turn.has_waited
    turn.close()


def test_pause_of_the_machine_lasts_as_long_as_the_turn(monkeypatch):
    monkeypatch.setattr(run_turns, "WAIT_SECONDS", 0.1)
    turn = Turn(1.0, threading.Event())
    turn.observe(status(Activity.PAUSED, PauseReason.HOURS))
    assert not turn.leaving.wait(0.5), "no other run would train"
    assert turn.leaving.wait(10) and turn.has_waited
    turn.close()


@pytest.mark.parametrize("reason", [PauseReason.RUN, PauseReason.HOURS])
def test_only_run_waits_as_long_as_it_takes(monkeypatch, reason):
    turn = Turn(math.inf, threading.Event())
    turn.observe(status(Activity.PAUSED, reason))
    assert not turn.leaving.wait(0.6) and not turn.end_with_round()
    turn.close()


def test_run_that_does_not_begin_to_train_passes_its_turn_on(monkeypatch):
    monkeypatch.setattr(run_turns, "PREPARE_SECONDS", 0.5)
    turn = Turn(0.1, threading.Event())
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


def test_run_that_waits_is_owed_nothing(quick_cycle, monkeypatch):
    monkeypatch.setattr(run_turns, "WAIT_SECONDS", 0.2)
    order = []

    def train(run: str, turn: Turn) -> None:
        order.append(run)
        if run == "b" and len(order) > 8:
            return  # it ends
        if run == "a":
            turn.observe(status(Activity.PAUSED, PauseReason.RUN))
            if "b" in order[-2:] or len(order) == 1:
                assert turn.leaving.wait(10)
            return
        train_rounds(turn, 1000)

    assert run_turns.train_in_turns({"a": 1, "b": 1}, threading.Event(), train)
    assert order[:4] == ["a", "b", "a", "b"]


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
