"""Find a group to average gradients with, and another one whenever it changes.

The links of the mesh carry what machines state and the invitations (`group_agreement.py` decides);
the gradients travel by `torch.distributed` (`gradient_group.py`). A group changes between two
steps: members that see a newcomer say so in the collective with which a step's averaging begins, so
all of them leave the group after the same step. Where a member vanishes in the middle of a step,
the others abandon that step and take it again with those that are left.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from torch import Tensor

from barnraise.exchange.mixing.gradient_group import GradientGroup, GroupConnector, GroupLostError
from barnraise.exchange.mixing.group_agreement import GroupAgreement, choose_excluded
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.step_inbox import FrameKind, MixingFrame
from barnraise.peering.addresses.local_addresses import LocalAddresses
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.protocol.group_messages import GroupInvitation, MemberActivity, MemberState

log = logging.getLogger("barnraise.exchange")

LOOK_SECONDS = 0.2  # between two looks at what the other machines state
MAX_LISTED_ADDRESSES = 8  # of a leader, in one invitation
NOT_FINITE = float("nan")


@dataclass(frozen=True)
class JoinedGroup:
    """A group that this machine has just joined.

    Attributes:
        source: key of the member whose weights and moments all others receive.
        shares_state: whether they need to.
        size: the number of members.
    """

    source: str
    shares_state: bool
    size: int


class AllReduceGroups:
    """This machine's part in one group after another. For the training loop's thread."""

    def __init__(
        self,
        links: MeshLinks,
        should_stop: Callable[[], bool],
        local_addresses: LocalAddresses | None = None,
    ) -> None:
        """Join no group yet.

        Args:
            links: to the other machines, started.
            should_stop: called several times a second while this machine waits for others.
            local_addresses: lists this machine's own addresses.
        """
        self._links = links
        self._should_stop = should_stop
        self._local_addresses = local_addresses or LocalAddresses()
        self._agreement = GroupAgreement(links.key)
        self._connector = GroupConnector(links.key, should_stop)
        self._group: GradientGroup | None = None
        self._lineage: tuple[str, int] | None = None  # group and its steps, see `Lineage`
        self._watched: tuple[str, ...] = ()  # members with a link to this machine
        self._state = MemberState(activity=MemberActivity.IDLE)
        self._wants_other_group = False
        self._repeats = RepeatedWarnings(log)
        self._trains_alone_without: tuple[str, ...] = ()

    # ---- between steps --------------------------------------------------------------------------

    @property
    def group(self) -> GradientGroup | None:
        """Return the group that this machine is in; None between two groups."""
        return self._group

    @property
    def problem(self) -> str:
        """Return why this machine trains alone although it has neighbours, or ""."""
        if self._group is None or self._group.size > 1 or not self._trains_alone_without:
            return ""
        names = ", ".join(key[:8] for key in self._trains_alone_without[:3])
        return (
            f"trains alone: it averages no gradients with {names}. All-reduce needs machines that "
            "reach each other directly by TCP, in one LAN or cluster, which NATs and firewalls "
            "prevent; the run goes on, and this machine tries again now and then"
        )

    def join(
        self, steps: int, step_seconds: float, should_stop: Callable[[], bool]
    ) -> JoinedGroup | None:
        """Wait for a group, and connect to its members.

        Args:
            steps: that this machine's optimizer has taken.
            step_seconds: that its last step took.
            should_stop: called several times a second; ends the wait.

        Returns:
            None if the wait was stopped.
        """
        assert self._group is None
        while not should_stop():
            self._publish(MemberActivity.WAITING, steps, step_seconds)
            self._agreement.start_waiting(self._state, time.monotonic())
            invitation = self._await_invitation(should_stop)
            self._agreement.stop_waiting()
            if invitation is None:
                continue
            try:
                self._group = self._connector.connect(invitation, self._find_problem)
            except GroupLostError as error:
                self._on_failed_attempt(invitation, error)
                continue
            self._on_joined(invitation, steps, step_seconds)
            return JoinedGroup(invitation.source, invitation.shares_state, len(invitation.members))
        return None

    def leave(self, is_pausing: bool = False) -> None:
        """Leave the group, if this machine is in one.

        Args:
            is_pausing: whether this machine does not wait for another group.
        """
        if self._group is not None:
            self._group.close()
            self._group = None
        if is_pausing and self._state.activity is not MemberActivity.IDLE:
            self._publish(MemberActivity.IDLE, self._state.steps, 0.0)

    def close(self) -> None:
        """Leave the group and wait for no other one."""
        self.leave(is_pausing=True)

    def confirm_state(self) -> None:
        """Record that this machine's weights and moments are the group's."""
        assert self._group is not None
        self._lineage = self._group.name, 0

    def disown_state(self) -> None:
        """Record that this machine's weights and moments are no group's any longer."""
        self._lineage = None

    @property
    def has_state(self) -> bool:
        """Return whether this machine's weights and moments are those of a group."""
        return self._lineage is not None

    def record_step(self) -> bool:
        """Count a step that all members have taken.

        Returns:
            Whether the group goes on. Where a member wants another one, all of them leave it after
            the same step.
        """
        assert self._group is not None and self._lineage is not None
        name, steps = self._lineage
        self._lineage = name, steps + 1
        return not self._wants_other_group

    # ---- within a step --------------------------------------------------------------------------

    def average_gradients(self, loss: float, gradients: Sequence[Tensor]) -> bool:
        """Replace the gradients by their mean over the group.

        A loss that is not finite on one machine makes the gradients undefined on all, so that all
        of them abandon the step.

        Args:
            loss: of this machine's batch.
            gradients: fp32 [n] each.

        Returns:
            False if the group is lost: the gradients are worthless.
        """
        group = self._group
        assert group is not None
        try:
            wishes, total_loss = group.sum_values([float(self._sees_newcomer()), loss])
            if math.isfinite(total_loss):
                group.average(gradients)
            else:
                for gradient in gradients:
                    gradient.fill_(NOT_FINITE)
        except GroupLostError as error:
            log.info("the group of %d machines has ended: %s", group.size, error)
            self.leave()
            return False
        self._wants_other_group = wishes > 0
        return True

    def broadcast(self, tensor: Tensor, source: str) -> bool:
        """Replace a tensor in host memory by that of one member.

        Returns:
            False if the group is lost; the tensor is unchanged.
        """
        assert self._group is not None
        try:
            self._group.broadcast(tensor, source)
        except GroupLostError as error:
            log.info("the group has ended while it shared its weights: %s", error)
            self.leave()
            return False
        return True

    # ---- agreement ------------------------------------------------------------------------------

    def _await_invitation(self, should_stop: Callable[[], bool]) -> GroupInvitation | None:
        """Wait until this machine leads a group or is invited to one.

        Returns:
            None if the wait was stopped, or if it should begin again.
        """
        while not should_stop():
            self._read_frames()
            neighbours = self._links.neighbours()
            now = time.monotonic()
            if invitation := self._agreement.pop_invitation():
                return invitation
            proposal = self._agreement.propose_group(neighbours, now, secrets.token_hex(16))
            if proposal is not None:
                return self._invite(proposal)
            if self._agreement.has_waited_in_vain(neighbours, now):
                leader = self._agreement.find_leader(neighbours, now)
                log.warning("%s waits for a group, but leads none: going on without it", leader[:8])
                self._agreement.exclude(leader, now)
                return None
            self._links.wait_for(lambda inbox: inbox.has_group_frames(), LOOK_SECONDS)
        return None

    def _invite(self, proposal: GroupInvitation) -> GroupInvitation:
        """Send an invitation to its members and return it."""
        others = proposal.members[1:]
        if not others:
            return proposal
        port = self._connector.serve_store()
        addresses = self._local_addresses.list_addresses({4: port, 6: port})
        # The loopback address is for machines that are programs on one computer.
        nearest = [*addresses[: MAX_LISTED_ADDRESSES - 1], f"127.0.0.1:{port}"]
        invitation = proposal.model_copy(update={"addresses": nearest})
        self._links.send_group_frame(
            FrameKind.INVITATION, invitation.model_dump_json().encode(), others
        )
        return invitation

    def _on_joined(self, invitation: GroupInvitation, steps: int, step_seconds: float) -> None:
        self._wants_other_group = False
        self._agreement.readmit(invitation.members)
        self._publish(MemberActivity.TRAINING, steps, step_seconds, invitation.group)
        neighbours = self._links.neighbours()
        inside = set(invitation.members)
        self._watched = tuple(key for key in neighbours if key in inside)
        active = self._agreement.list_active(neighbours)
        self._trains_alone_without = tuple(key for key in active if key not in inside)
        log.info("a group of %d averages the gradients of every step", len(inside))
        if self.problem:
            self._repeats.warn("trains alone", "this machine %s", self.problem)

    def _on_failed_attempt(self, invitation: GroupInvitation, error: GroupLostError) -> None:
        """Leave out the machines on which a group has failed, if this one led it."""
        self._repeats.warn(str(error), "no group: %s", error)
        members = invitation.members
        if members[0] == self._links.key:
            excluded = choose_excluded(members, error.missing, error.were_met)
            for key in excluded or members[1:]:
                self._agreement.exclude(key, time.monotonic())

    def _publish(
        self,
        activity: MemberActivity,
        steps: int,
        step_seconds: float,
        group: str | None = None,
    ) -> None:
        """State to all neighbours what this machine does.

        Args:
            activity: what it does.
            steps: that its optimizer has taken.
            step_seconds: that its last step took.
            group: that it trains in; None: the one that it was in last.
        """
        self._state = MemberState(
            activity=activity,
            group=self._state.group if group is None else group,
            steps=steps,
            lineage="{}:{}".format(*self._lineage) if self._lineage else "",
            step_seconds=step_seconds,
        )
        self._links.publish_member_state(self._state.model_dump_json().encode())

    def _read_frames(self) -> None:
        """Record what the other machines have stated."""
        self._agreement.forget_unlinked(self._links.neighbours())
        for key, frame in self._links.pop_group_frames():
            try:
                self._record(key, frame)
            except ValidationError:
                self._repeats.warn(
                    key, "ignored a message about a group from %s: it is not valid", key[:8]
                )

    def _record(self, key: str, frame: MixingFrame) -> None:
        text = bytes(frame.data)
        if frame.kind is FrameKind.MEMBER_STATE:
            self._agreement.record_state(key, MemberState.model_validate_json(text))
        else:
            self._agreement.record_invitation(key, GroupInvitation.model_validate_json(text))

    def _sees_newcomer(self) -> bool:
        """Return whether this machine leads the group and another one may be invited to it."""
        self._read_frames()
        group = self._group
        if group is None or group.members[0] != self._links.key:
            return False
        neighbours = self._links.neighbours()
        now = time.monotonic()
        return bool(self._agreement.list_newcomers(group.name, group.members, neighbours, now))

    def _find_problem(self) -> str:
        """Return why the group is not whole any longer, or "". A collective polls this."""
        group = self._group
        if self._should_stop():
            return "this machine leaves"
        if group is None:
            return ""
        self._read_frames()
        neighbours = self._links.neighbours()
        lost = self._agreement.find_lost_member(group.name, self._watched, neighbours)
        return f"{lost[:8]} is gone" if lost else ""
