"""Enumerations of the protocol: a machine's role, a run's status and a machine's activity."""

from enum import StrEnum


class Role(StrEnum):
    """What a ticket permits a machine to do."""

    WORKER = "worker"  # trains
    ARCHIVE = "archive"  # stores all updates for the verdict horizon


class Standing(StrEnum):
    """What a run's owner knows of a volunteer, as a ticket says it."""

    # Joined a run that anyone may join, where people whom the owner let in train: updates count
    # once these find that the newcomer's agree with theirs.
    NEWCOMER = "newcomer"
    STRANGER = "stranger"  # joined a run that anyone may join, where no such people train
    INVITED = "invited"  # the owner let this person in, by invitation, team or approval
    OWNER = "owner"  # the machine is the owner's

    @property
    def is_let_in(self) -> bool:
        """Whether the owner vouches for the volunteer."""
        return self in (Standing.INVITED, Standing.OWNER)


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


class PauseReason(StrEnum):
    """Why a machine takes no steps although its run is not over.

    It says nothing of the machine's programs or its figures: everybody who sees the run sees it.
    """

    HERE = "here"  # somebody paused it on the machine itself
    SITE = "site"  # its owner paused it on the site
    RUN = "run"  # the whole run is paused
    RECRUITING = "recruiting"  # the run waits for more machines
    HOURS = "hours"
    IN_USE = "in_use"  # somebody uses keyboard or mouse
    BATTERY = "battery"
    BUSY = "busy"  # other programs use the CPU
    PROGRAM = "program"  # a program runs that goes first
    HOT = "hot"
    TRAFFIC = "traffic"  # the month's upload is used up
    DISK_WRITES = "disk_writes"  # the day's writes are used up
    RULES = "rules"  # the file with its owner's rules cannot be read
    OWNER = "owner"  # the run's owner must decide about it

    @property
    def concerns_one_machine(self) -> bool:
        """Whether other machines of the run go on."""
        return self not in (PauseReason.RUN, PauseReason.RECRUITING, PauseReason.OWNER)


class SigningRight(StrEnum):
    """Whether a machine may prepare a run's text, and so sign for the run as its owner."""

    ALLOWED = "allowed"
    UNCONFIRMED = "unconfirmed"  # it is the owner's, who has not confirmed it yet
    REFUSED = "refused"  # it is somebody else's


class JoinPurpose(StrEnum):
    """Why a machine joins a run."""

    TRAIN = "train"
    FETCH = "fetch"  # the weights: it counts as no machine of the run
    CREW = "crew"  # as a member of a crew: it needs no text, and no memory for the whole model
