"""The messages that travel in the requests to a coordinator's API and in its answers."""

from barnraise.protocol.checkups import Checkup
from barnraise.protocol.coordinator_messages import (
    EnrolmentReply,
    EnrolmentRequest,
    EnrolmentStatus,
    InvitationToken,
    JoinReply,
    JoinRequest,
    MirrorView,
    Problem,
    ReportReply,
    Reports,
    RunPage,
    RunView,
    TextManifest,
    WorkerRelease,
)
from barnraise.protocol.evaluation import PublishedTexts, TaskScore
from barnraise.protocol.messages import Signed
from barnraise.protocol.types import Message

API_MESSAGES: tuple[type[Message], ...] = (
    Checkup,
    MirrorView,
    Signed,
    EnrolmentRequest,
    EnrolmentReply,
    EnrolmentStatus,
    WorkerRelease,
    RunView,
    RunPage,
    InvitationToken,
    JoinRequest,
    JoinReply,
    Reports,
    ReportReply,
    TextManifest,
    PublishedTexts,
    TaskScore,
    Problem,
)
