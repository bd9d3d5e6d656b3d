"""Messages by which machines agree on a group that averages gradients, over a mesh's channels."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from barnraise.protocol.types import Addresses, Count, Message, PublicKey, Seconds

MAX_GROUP = 256  # machines of one group

GroupId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
# The group in which a machine took its last step, and how many steps that group had taken by then.
Lineage = Annotated[str, Field(pattern=r"^([0-9a-f]{32}:[0-9]{1,18})?$")]


class MemberActivity(StrEnum):
    """What a machine of the mesh does."""

    WAITING = "waiting"  # for a group
    TRAINING = "training"  # in a group
    IDLE = "idle"  # paused, or about to leave: nobody waits for it


class MemberState(Message):
    """What a machine states of itself to all machines that it is linked to.

    Attributes:
        activity: what it does.
        group: the group that it trains in, or was in last; "" for none.
        steps: that its optimizer has taken.
        lineage: machines with equal lineages have equal weights and moments; "" equals none.
        step_seconds: that its last step took; 0 before the first.
    """

    activity: MemberActivity
    group: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    steps: Count = 0
    lineage: Lineage = ""
    step_seconds: Seconds = 0.0


class GroupInvitation(Message):
    """A leader's decision: who averages gradients from now on.

    Attributes:
        group: a new random name.
        members: sorted; a member's place is its rank, and the leader is the first.
        source: the member whose weights and moments all others receive.
        shares_state: whether they need to.
        addresses: of the leader's store, the most useful first.
    """

    group: GroupId
    members: Annotated[list[PublicKey], Field(min_length=1, max_length=MAX_GROUP)]
    source: PublicKey
    shares_state: bool
    addresses: Addresses = []
