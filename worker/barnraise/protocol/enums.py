"""Enumerations of the protocol: a machine's role, a run's status and a machine's activity."""

from enum import StrEnum


class Role(StrEnum):
    """What a ticket permits a machine to do."""

    WORKER = "worker"  # trains
    ARCHIVE = "archive"  # stores all updates for the verdict horizon


class Standing(StrEnum):
    """What a run's owner knows of a volunteer, as a ticket says it."""

    STRANGER = "stranger"  # joined a run that anyone may join
    INVITED = "invited"  # the owner let this person in, by invitation, team or approval
    OWNER = "owner"  # the machine is the owner's


class RunStatus(StrEnum):
    """A run's place in its life cycle. The coordinator decides it; workers obey."""

    DRAFT = "draft"  # its spec is being written, or its text is being prepared
    RECRUITING = "recruiting"  # launched: the spec is fixed; waits for enough machines
    TRAINING = "training"
    PAUSED = "paused"  # workers keep their state and their connections, and take no steps
    FINISHED = "finished"  # the budget is spent and the final checkpoint is safe
    CANCELLED = "cancelled"


class Activity(StrEnum):
    """What a machine does in a run now."""

    PREPARING = "preparing"  # prepares or fetches the text
    JOINING = "joining"  # fetches the anchor
    TRAINING = "training"
    PAUSED = "paused"
    SUSPENDED = "suspended"  # the budget was spent faster than machines can train: owner decides
    FINISHING = "finishing"  # the budget is spent; waits until every peer has every update
    FINISHED = "finished"  # the final checkpoint is on this machine
    LEFT = "left"
    FETCHING = "fetching"  # downloads the weights and does not train: no machine of the run

    @property
    def is_working(self) -> bool:
        """Whether a machine with this activity has not finished yet, and is one of the run."""
        return self not in (Activity.FINISHED, Activity.LEFT, Activity.FETCHING)


class SigningRight(StrEnum):
    """Whether a machine may prepare a run's text, and so sign for the run as its owner."""

    ALLOWED = "allowed"
    UNCONFIRMED = "unconfirmed"  # it is the owner's, who has not confirmed it yet
    REFUSED = "refused"  # it is somebody else's


class JoinPurpose(StrEnum):
    """Why a machine joins a run."""

    TRAIN = "train"
    FETCH = "fetch"  # the weights: it counts as no machine of the run
