"""Decide which machines average gradients together. Pure: time is an argument.

Machines of a mesh state to each other what they do. Those that wait for a group follow the one with
the smallest key, which invites all others that wait, once every machine that it is linked to either
waits or is idle, or once it has waited long enough for the rest. The sorted keys of the invited are
their ranks. A machine that cannot be reached is left out for a while, so that it costs the others
some seconds now and then, and never the run.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from barnraise.protocol.group_messages import (
    MAX_GROUP,
    GroupInvitation,
    MemberActivity,
    MemberState,
)

GATHER_SECONDS = 20.0  # a leader waits this long for machines that do not wait yet
STEP_PATIENCE = 3.0  # or for so many of their steps, if that is longer
MAX_GATHER_SECONDS = 600.0
# A follower waits so much longer than a leader gathers, and then follows another one.
FOLLOW_SECONDS = 60.0
FIRST_EXCLUSION_SECONDS = 60.0  # doubles with each failure in a row
MAX_EXCLUSION_SECONDS = 3600.0
REMEMBERED_GROUPS = 8  # that one machine has left


@dataclass(frozen=True)
class Exclusion:
    """A machine with which no group came about.

    Attributes:
        until: monotonic seconds.
        failures: in a row.
    """

    until: float
    failures: int


class GroupAgreement:
    """One machine's view of who waits, and what follows from it."""

    def __init__(self, key: str) -> None:
        """Record nothing yet; `key` is this machine's own."""
        self._key = key
        self._states: dict[str, MemberState] = {}
        self._left: dict[str, deque[str]] = {}  # by key, the groups that it stated to have left
        self._exclusions: dict[str, Exclusion] = {}
        # Groups that this machine has left. A member that still states to train in one has
        # vanished, or will notice soon.
        self._own_groups: deque[str] = deque(maxlen=REMEMBERED_GROUPS)
        self._own: MemberState | None = None  # while this machine waits
        self._waiting_since = 0.0
        self._invitation: GroupInvitation | None = None

    # ---- facts ----------------------------------------------------------------------------------

    def record_state(self, key: str, state: MemberState) -> None:
        """Record what another machine states of itself."""
        self._states[key] = state
        if state.activity is not MemberActivity.TRAINING and state.group:
            self._left.setdefault(key, deque(maxlen=REMEMBERED_GROUPS)).append(state.group)

    def record_invitation(self, key: str, invitation: GroupInvitation) -> None:
        """Record an invitation, if this machine waits and the sender may invite it."""
        members = invitation.members
        is_valid = (
            members == sorted(set(members))
            and key == members[0]
            and self._key in members
            and invitation.source in members
        )
        if is_valid and self._own is not None:
            self._invitation = invitation

    def forget_unlinked(self, neighbours: Iterable[str]) -> None:
        """Drop what machines without a link have stated; they state it again with a new link."""
        linked = set(neighbours)
        self._states = {key: state for key, state in self._states.items() if key in linked}
        self._left = {key: groups for key, groups in self._left.items() if key in linked}

    def start_waiting(self, own: MemberState, now: float) -> None:
        """Wait for a group from now on."""
        self._own, self._waiting_since, self._invitation = own, now, None
        if own.group:
            self._own_groups.append(own.group)

    def stop_waiting(self) -> None:
        """Wait no longer."""
        self._own = self._invitation = None

    def exclude(self, key: str, now: float) -> None:
        """Leave out a machine with which no group came about, longer each time."""
        earlier = self._exclusions.get(key)
        failures = earlier.failures + 1 if earlier else 1
        seconds = FIRST_EXCLUSION_SECONDS * 2 ** min(failures - 1, 20)
        self._exclusions[key] = Exclusion(now + min(seconds, MAX_EXCLUSION_SECONDS), failures)

    def readmit(self, keys: Iterable[str]) -> None:
        """Forget the failures of machines with which a group came about."""
        for key in keys:
            self._exclusions.pop(key, None)

    # ---- decisions ------------------------------------------------------------------------------

    def find_leader(self, neighbours: Sequence[str], now: float) -> str:
        """Return the smallest key of those that wait, this machine's included."""
        return min([self._key, *self._list_waiting(neighbours, now)])

    def has_waited_in_vain(self, neighbours: Sequence[str], now: float) -> bool:
        """Return whether the leader should have invited this machine by now."""
        limit = self._gather_limit(neighbours) + FOLLOW_SECONDS
        return now - self._waiting_since > limit

    def propose_group(
        self, neighbours: Sequence[str], now: float, name: str
    ) -> GroupInvitation | None:
        """Return whom this machine invites, without its addresses.

        Args:
            neighbours: keys of the machines with a link to this one.
            now: monotonic seconds.
            name: of the new group.

        Returns:
            None if another machine leads, or if there is reason to wait for others.
        """
        own = self._own
        if own is None or self.find_leader(neighbours, now) != self._key:
            return None
        waiting = self._list_waiting(neighbours, now)
        awaited = [
            key
            for key in neighbours
            if key not in waiting
            and not self._is_excluded(key, now)
            and not self._has_activity(key, MemberActivity.IDLE)
        ]
        if awaited and now - self._waiting_since < self._gather_limit(neighbours):
            return None
        states = {key: self._states[key] for key in waiting[: MAX_GROUP - 1]} | {self._key: own}
        lineages = {state.lineage for state in states.values()}
        return GroupInvitation(
            group=name,
            members=sorted(states),
            source=choose_source(states),
            shares_state=len(states) > 1 and (len(lineages) > 1 or "" in lineages),
        )

    def pop_invitation(self) -> GroupInvitation | None:
        """Remove and return the newest invitation; None if there is none."""
        invitation, self._invitation = self._invitation, None
        return invitation

    def find_lost_member(
        self, group: str, members: Iterable[str], neighbours: Iterable[str]
    ) -> str | None:
        """Return a member that has lost its link or has left the group; None for none.

        Args:
            group: its name.
            members: those that were linked to this machine when the group began.
            neighbours: those that are linked now.
        """
        linked = set(neighbours)
        for key in members:
            if key not in linked or group in self._left.get(key, ()):
                return key
        return None

    def list_active(self, neighbours: Iterable[str]) -> list[str]:
        """Return the machines that wait for a group, or train in one that is not abandoned."""
        return [
            key
            for key in neighbours
            if self._has_activity(key, MemberActivity.WAITING)
            or (
                self._has_activity(key, MemberActivity.TRAINING)
                and self._states[key].group not in self._own_groups
            )
        ]

    def list_newcomers(
        self, group: str, members: Iterable[str], neighbours: Sequence[str], now: float
    ) -> list[str]:
        """Return the machines that wait, or train in another group, and may be invited."""
        inside = set(members)
        return [
            key
            for key in self.list_active(neighbours)
            if key not in inside
            and not self._is_excluded(key, now)
            and not (
                self._has_activity(key, MemberActivity.TRAINING)
                and self._states[key].group == group
            )
        ]

    def _list_waiting(self, neighbours: Sequence[str], now: float) -> list[str]:
        return [
            key
            for key in sorted(neighbours)
            if self._has_activity(key, MemberActivity.WAITING) and not self._is_excluded(key, now)
        ]

    def _has_activity(self, key: str, activity: MemberActivity) -> bool:
        state = self._states.get(key)
        return state is not None and state.activity is activity

    def _is_excluded(self, key: str, now: float) -> bool:
        exclusion = self._exclusions.get(key)
        return exclusion is not None and now < exclusion.until

    def _gather_limit(self, neighbours: Sequence[str]) -> float:
        known = [state for key in neighbours if (state := self._states.get(key)) is not None]
        steps = [state.step_seconds for state in (*known, *([self._own] if self._own else []))]
        slowest = max(steps, default=0.0)
        return min(MAX_GATHER_SECONDS, max(GATHER_SECONDS, STEP_PATIENCE * slowest))


def choose_source(states: dict[str, MemberState]) -> str:
    """Return the key of the machine whose weights and moments a group continues with.

    Those that have trained in a group come before those that have not, then the one with the most
    steps, then the smallest key.

    Args:
        states: of all members, by key.
    """
    return min(states, key=lambda key: (not states[key].lineage, -states[key].steps, key))


def choose_excluded(members: Sequence[str], missing: Sequence[str], were_met: bool) -> list[str]:
    """Return the members that a leader leaves out after a group did not come about.

    Args:
        members: of the group, sorted; the leader is the first.
        missing: those that did not report.
        were_met: whether all had reached the leader, but not each other. Then the two ends of a
            missing connection are both missing, and one of them is left out.
    """
    others = [key for key in missing if key != members[0]]
    return others[-1:] if were_met else others
