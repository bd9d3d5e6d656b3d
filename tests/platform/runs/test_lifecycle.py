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

small = st.integers(0, 4)
facts = st.builds(
    LifecycleFacts,
    launch_requested=st.booleans(),
    manifest=st.booleans(),
    quorum=small,
    alive=small,
    ledger_tokens=st.integers(0, 200),
    token_budget=st.integers(1, 200),
    owner_safe=st.booleans(),
    others_safe=small,
    others_ever=small,
)
ORDER = [RunStatus.DRAFT, RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.FINISHED]


@given(st.sampled_from(RunStatus), facts)
def test_a_tick_moves_at_most_one_step_forward_and_says_the_same_twice(status, known):
    after = next_status(status, known)
    assert after == next_status(status, known)
    assert after is status or ORDER.index(after) == ORDER.index(status) + 1


@given(st.sampled_from([RunStatus.PAUSED, RunStatus.FINISHED, RunStatus.CANCELLED]), facts)
def test_what_a_person_decided_no_tick_changes(status, known):
    assert next_status(status, known) is status


@given(facts)
def test_a_run_finishes_only_with_its_budget_spent_and_its_model_safe(known):
    if next_status(RunStatus.TRAINING, known) is RunStatus.FINISHED:
        assert known.ledger_tokens >= known.token_budget
        assert known.owner_safe
        assert known.others_safe >= min(2, known.others_ever)
    elif known.ledger_tokens >= known.token_budget:
        assert "waiting for" in missing_confirmations(known)


@given(facts)
def test_ticks_come_to_rest(known):
    status = RunStatus.DRAFT
    for _ in range(4):
        status = next_status(status, known)
    assert next_status(status, known) is status


@given(facts, st.integers(0, 5))
def test_one_more_safe_copy_never_holds_a_run_back(known, more):
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
def test_the_warning_names_who_must_still_confirm(known, sentence):
    assert sentence in missing_confirmations(known)
    assert missing_confirmations(known) == waiting_reason(
        RunStatus.TRAINING, replace(known, ledger_tokens=5, token_budget=5, alive=1)
    )


def test_only_what_is_over_has_no_way_on():
    for status in RunStatus:
        ways = [action for action, (allowed, _) in TRANSITIONS.items() if status in allowed]
        assert bool(ways) == (status not in (RunStatus.FINISHED, RunStatus.CANCELLED))
