"""Test what a machine pauses for, and when a pause gives the memory back."""

from datetime import UTC, datetime, timedelta

import pytest

from barnraise.protocol.coordinator_messages import Directive
from barnraise.protocol.enums import PauseReason, RunStatus
from barnraise.training.limits.decision import TRAIN, TrainingDecision
from barnraise.training.local_control import LocalPause
from barnraise.training.pauses import (
    LONG_SECONDS,
    MOMENT_SECONDS,
    choose_pause,
    frees_memory,
)

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
NOW = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)
IN_AN_HOUR = (NOW + timedelta(hours=1)).timestamp()
BY_HOURS = TrainingDecision(PauseReason.HOURS, "paused until 13:00 by its hours", IN_AN_HOUR)
ON_BATTERY = TrainingDecision(PauseReason.BATTERY, "paused: on battery", NOW.timestamp() + 60)


def directive(status: RunStatus = RunStatus.TRAINING, **fields) -> Directive:
    return Directive(run=RUN, machine=RUN, status=status, issued=NOW.timestamp(), **fields)


PAUSED = RunStatus.PAUSED


@pytest.mark.parametrize(
    ("local", "decision", "ordered", "reason", "sentence"),
    [
        (LocalPause(), BY_HOURS, directive(PAUSED), PauseReason.HERE, "paused on this machine"),
        (
            LocalPause(until=IN_AN_HOUR),
            TRAIN,
            directive(),
            PauseReason.HERE,
            "paused until 13:00 on this machine",
        ),
        (None, BY_HOURS, directive(PAUSED), PauseReason.HOURS, "paused until 13:00 by its hours"),
        (None, ON_BATTERY, directive(), PauseReason.BATTERY, "paused: on battery"),
        (None, TRAIN, directive(PAUSED), PauseReason.RUN, "the run is paused on the site"),
        (
            None,
            TRAIN,
            directive(PAUSED, own_pause=True),
            PauseReason.SITE,
            "paused on the site",
        ),
        (
            None,
            TRAIN,
            directive(PAUSED, own_pause=True, pause_until=IN_AN_HOUR),
            PauseReason.SITE,
            "paused until 13:00 on the site",
        ),
        (
            None,
            TRAIN,
            directive(RunStatus.RECRUITING),
            PauseReason.RECRUITING,
            "waits for more machines to join",
        ),
    ],
)
def test_reason_of_a_pause(local, decision, ordered, reason, sentence):
    pause = choose_pause(local, decision, ordered, NOW)
    assert pause is not None and (pause.kind, pause.reason) == (reason, sentence)
    assert pause.view.reason is reason and pause.view.until == pause.until


def test_machine_trains_where_nothing_pauses_it():
    assert choose_pause(None, TRAIN, directive(), NOW) is None
    ended = directive(PAUSED, own_pause=True, pause_until=NOW.timestamp())
    assert choose_pause(None, TRAIN, ended, NOW) is None, "the site need not end it"


def test_end_that_is_only_a_hold_is_not_shown():
    pause = choose_pause(None, ON_BATTERY, directive(), NOW)
    assert pause is not None and pause.until is None


@pytest.mark.parametrize(
    ("reason", "seconds", "frees_after"),
    [
        (PauseReason.HERE, None, MOMENT_SECONDS),
        (PauseReason.SITE, None, MOMENT_SECONDS),
        (PauseReason.PROGRAM, None, MOMENT_SECONDS),
        (PauseReason.HERE, 3600.0, MOMENT_SECONDS),
        (PauseReason.HOURS, 3600.0, MOMENT_SECONDS),
        (PauseReason.HERE, 50.0, None),
        (PauseReason.BUSY, None, LONG_SECONDS),
        (PauseReason.RUN, None, LONG_SECONDS),
    ],
)
def test_pause_of_more_than_a_minute_frees_the_memory(reason, seconds, frees_after):
    begun = NOW.timestamp()
    pause = TrainingDecision(reason, "paused", None if seconds is None else begun + seconds)
    lasted = [step / 10 for step in range(10 * int(seconds or 100)) if step < 1000]
    freeing = [past for past in lasted if frees_memory(pause, past, begun + past)]
    assert freeing[:1] == ([] if frees_after is None else [frees_after + 0.1])
