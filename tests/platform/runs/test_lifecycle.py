"""Test the rules by which a run changes its status."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.enums import RunStatus
from coordinator.runs.lifecycle import (
    TRANSITIONS,
    LifecycleFacts,
    missing_confirmations,
    next_status,
    waiting_reason,
)

SMALL_COUNTS = st.integers(0, 4)
FACTS = st.builds(
    LifecycleFacts,
    launch_requested=st.booleans(),
    manifest=st.booleans(),
    quorum=SMALL_COUNTS,
    alive=SMALL_COUNTS,
    ledger_tokens=st.integers(0, 200),
    token_budget=st.integers(1, 200),
    owner_safe=st.booleans(),
    others_safe=SMALL_COUNTS,
    others_ever=SMALL_COUNTS,
)
ORDER = [RunStatus.DRAFT, RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.FINISHED]


@given(st.sampled_from(RunStatus), FACTS)
def test_next_status_is_the_same_or_the_next_and_repeatable(status, known):
    after = next_status(status, known)
    assert after == next_status(status, known)
    assert after is status or ORDER.index(after) == ORDER.index(status) + 1


@given(st.sampled_from([RunStatus.PAUSED, RunStatus.FINISHED, RunStatus.CANCELLED]), FACTS)
def test_next_status_never_leaves_a_status_that_a_person_set(status, known):
    assert next_status(status, known) is status


@given(FACTS)
def test_run_finishes_only_if_budget_is_spent_and_model_is_safe(known):
    if next_status(RunStatus.TRAINING, known) is RunStatus.FINISHED:
        assert known.ledger_tokens >= known.token_budget
        assert known.owner_safe
        assert known.others_safe >= min(2, known.others_ever)
    elif known.ledger_tokens >= known.token_budget:
        assert "waiting for" in missing_confirmations(known)


@given(FACTS)
def test_next_status_reaches_a_fixed_point(known):
    status = RunStatus.DRAFT
    for _ in range(4):
        status = next_status(status, known)
    assert next_status(status, known) is status


@given(FACTS, st.integers(0, 5))
def test_more_safe_copies_never_prevent_finishing(known, more):
    better = replace(known, others_safe=known.others_safe + more, owner_safe=True)
    if next_status(RunStatus.TRAINING, known) is RunStatus.FINISHED:
        assert next_status(RunStatus.TRAINING, better) is RunStatus.FINISHED


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (LifecycleFacts(others_ever=5), "the owner's machine and machines of 2 other people"),
        (
            LifecycleFacts(others_ever=5, others_safe=1, owner_safe=True),
            "a machine of one other person",
        ),
        (LifecycleFacts(others_ever=0), "the owner's machine to confirm"),
    ],
)
def test_missing_confirmations_names_who_must_still_confirm(known, sentence):
    assert sentence in missing_confirmations(known)
    assert missing_confirmations(known) == waiting_reason(
        RunStatus.TRAINING, replace(known, ledger_tokens=5, token_budget=5, alive=1)
    )


def test_only_ended_statuses_allow_no_action():
    for status in RunStatus:
        actions = [action for action, (allowed, _) in TRANSITIONS.items() if status in allowed]
        assert bool(actions) == (status not in (RunStatus.FINISHED, RunStatus.CANCELLED))
