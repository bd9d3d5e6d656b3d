"""Test who averages gradients with whom; time is an argument."""

import pytest
from pydantic import ValidationError

from barnraise.exchange.mixing.group_agreement import (
    FIRST_EXCLUSION_SECONDS,
    FOLLOW_SECONDS,
    GATHER_SECONDS,
    MAX_EXCLUSION_SECONDS,
    MAX_GATHER_SECONDS,
    GroupAgreement,
    choose_excluded,
    choose_source,
)
from barnraise.protocol.group_messages import GroupInvitation, MemberActivity, MemberState
from barnraise.protocol.signing import Identity

ADA, BEN, CLEO = sorted(Identity(bytes([n]) * 32).key for n in (1, 2, 3))
GROUP, OTHER = "1" * 32, "2" * 32
WAITING = MemberState(activity=MemberActivity.WAITING)
IDLE = MemberState(activity=MemberActivity.IDLE)
TRAINING = MemberState(activity=MemberActivity.TRAINING, group=GROUP)


def waiting_agreement(key: str = ADA, **states: MemberState) -> GroupAgreement:
    agreement = GroupAgreement(key)
    agreement.start_waiting(WAITING, 0.0)
    for name, state in states.items():
        agreement.record_state({"ada": ADA, "ben": BEN, "cleo": CLEO}[name], state)
    return agreement


def invite(members: list[str], source: str = "") -> GroupInvitation:
    return GroupInvitation(
        group=GROUP, members=members, source=source or members[0], shares_state=True
    )


def test_machine_without_neighbours_is_a_group_at_once():
    proposal = waiting_agreement().propose_group([], 0.0, GROUP)
    assert proposal is not None
    assert (proposal.members, proposal.source, proposal.shares_state) == ([ADA], ADA, False)


def test_smallest_key_invites_once_all_neighbours_wait_or_idle():
    agreement = waiting_agreement(ben=WAITING)
    assert agreement.propose_group([BEN, CLEO], 1.0, GROUP) is None, "cleo has stated nothing"
    agreement.record_state(CLEO, IDLE)
    proposal = agreement.propose_group([BEN, CLEO], 1.0, GROUP)
    assert proposal is not None and proposal.members == [ADA, BEN] and proposal.shares_state
    follower = waiting_agreement(BEN, ada=WAITING)
    assert follower.propose_group([ADA], 1.0, GROUP) is None
    assert follower.find_leader([ADA], 1.0) == ADA


def test_leader_waits_for_silent_and_slow_machines_a_bounded_time():
    agreement = waiting_agreement(ben=WAITING)
    assert agreement.propose_group([BEN, CLEO], GATHER_SECONDS - 1, GROUP) is None
    assert agreement.propose_group([BEN, CLEO], GATHER_SECONDS, GROUP) is not None
    slow = TRAINING.model_copy(update={"step_seconds": 100.0})
    agreement.record_state(CLEO, slow)
    assert agreement.propose_group([BEN, CLEO], 299.0, GROUP) is None
    assert agreement.propose_group([BEN, CLEO], 300.0, GROUP) is not None
    agreement.record_state(CLEO, slow.model_copy(update={"step_seconds": 1e8}))
    assert agreement.propose_group([BEN, CLEO], MAX_GATHER_SECONDS, GROUP) is not None


def test_follower_goes_on_without_a_leader_that_invites_nobody():
    agreement = waiting_agreement(BEN, ada=WAITING)
    limit = GATHER_SECONDS + FOLLOW_SECONDS
    assert not agreement.has_waited_in_vain([ADA], limit - 1)
    assert agreement.has_waited_in_vain([ADA], limit + 1)
    agreement.exclude(ADA, limit)
    assert agreement.find_leader([ADA], limit) == BEN
    proposal = agreement.propose_group([ADA], limit, GROUP)
    assert proposal is not None and proposal.members == [BEN]
    assert agreement.find_leader([ADA], limit + FIRST_EXCLUSION_SECONDS) == ADA


def test_exclusion_doubles_up_to_a_limit_and_ends_with_a_group():
    agreement = waiting_agreement(ben=WAITING)
    for _ in range(40):
        agreement.exclude(BEN, 0.0)
    alone = agreement.propose_group([BEN], MAX_EXCLUSION_SECONDS - 1, GROUP)
    assert alone is not None and alone.members == [ADA]
    both = agreement.propose_group([BEN], MAX_EXCLUSION_SECONDS, GROUP)
    assert both is not None and both.members == [ADA, BEN]
    agreement.readmit([BEN])
    agreement.exclude(BEN, 0.0)
    again = agreement.propose_group([BEN], FIRST_EXCLUSION_SECONDS, GROUP)
    assert again is not None and again.members == [ADA, BEN]


def test_invitation_counts_only_from_the_leader_that_it_names():
    agreement = waiting_agreement(BEN)
    for sender, invitation in (
        (CLEO, invite([ADA, BEN])),
        (ADA, invite([ADA, CLEO])),
        (BEN, invite([BEN, ADA])),
        (ADA, invite([ADA, BEN], CLEO)),
        (ADA, invite([ADA, BEN, BEN])),
    ):
        agreement.record_invitation(sender, invitation)
        assert agreement.pop_invitation() is None
    agreement.record_invitation(ADA, invite([ADA, BEN]))
    assert agreement.pop_invitation() == invite([ADA, BEN])
    agreement.stop_waiting()
    agreement.record_invitation(ADA, invite([ADA, BEN]))
    assert agreement.pop_invitation() is None, "it waits for no group"


def test_equal_lineages_need_no_state_and_the_furthest_member_shares_it():
    same = MemberState(activity=MemberActivity.WAITING, lineage=f"{GROUP}:7", steps=7)
    agreement = GroupAgreement(ADA)
    agreement.start_waiting(same, 0.0)
    agreement.record_state(BEN, same)
    proposal = agreement.propose_group([BEN], 0.0, OTHER)
    assert proposal is not None and not proposal.shares_state
    ahead = same.model_copy(update={"lineage": f"{GROUP}:8", "steps": 8})
    fresh = MemberState(activity=MemberActivity.WAITING, steps=1000)
    agreement.record_state(BEN, ahead)
    agreement.record_state(CLEO, fresh)
    proposal = agreement.propose_group([BEN, CLEO], 0.0, OTHER)
    assert proposal is not None and proposal.shares_state and proposal.source == BEN
    assert choose_source({CLEO: fresh, BEN: WAITING}) == CLEO, "without a group, the most steps"


def test_member_that_states_to_have_left_or_loses_its_link_is_lost():
    agreement = GroupAgreement(ADA)
    assert agreement.find_lost_member(GROUP, [BEN], [BEN]) is None
    agreement.record_state(BEN, MemberState(activity=MemberActivity.WAITING, group=OTHER))
    assert agreement.find_lost_member(GROUP, [BEN], [BEN]) is None, "of an earlier group"
    agreement.record_state(BEN, MemberState(activity=MemberActivity.IDLE, group=GROUP))
    agreement.record_state(BEN, MemberState(activity=MemberActivity.TRAINING, group=OTHER))
    assert agreement.find_lost_member(GROUP, [BEN], [BEN]) == BEN
    assert agreement.find_lost_member(OTHER, [BEN], []) == BEN


def test_newcomers_wait_or_train_elsewhere_and_are_not_excluded():
    agreement = GroupAgreement(ADA)
    linked = [BEN, CLEO]
    assert agreement.list_newcomers(GROUP, [ADA], linked, 0.0) == []
    agreement.record_state(BEN, IDLE)
    agreement.record_state(CLEO, TRAINING)
    assert agreement.list_newcomers(GROUP, [ADA], linked, 0.0) == []
    assert agreement.list_newcomers(OTHER, [ADA], linked, 0.0) == [CLEO]
    agreement.start_waiting(WAITING.model_copy(update={"group": GROUP}), 0.0)
    agreement.stop_waiting()
    assert agreement.list_newcomers(OTHER, [ADA], linked, 0.0) == [], "cleo vanished with its group"
    agreement.record_state(BEN, WAITING)
    assert agreement.list_newcomers(GROUP, [ADA], linked, 0.0) == [BEN]
    assert agreement.list_newcomers(GROUP, [ADA, BEN], linked, 0.0) == []
    agreement.exclude(BEN, 0.0)
    assert agreement.list_newcomers(GROUP, [ADA], linked, 1.0) == []
    agreement.forget_unlinked([])
    assert agreement.list_active(linked) == []


def test_leader_leaves_out_those_that_did_not_report():
    assert choose_excluded([ADA, BEN, CLEO], [BEN, CLEO], were_met=False) == [BEN, CLEO]
    assert choose_excluded([ADA, BEN, CLEO], [BEN, CLEO], were_met=True) == [CLEO]
    assert choose_excluded([ADA, BEN], [ADA], were_met=True) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"activity": "asleep"},
        {"group": "x"},
        {"lineage": "1"},
        {"steps": -1},
        {"step_seconds": float("inf")},
    ],
)
def test_impossible_states_are_refused(changed):
    with pytest.raises(ValidationError):
        MemberState.model_validate(WAITING.model_dump() | changed)
