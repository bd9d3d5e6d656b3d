"""The words of the wire: what a machine is for, where a run is in its life, and what a machine does in it."""

from enum import StrEnum


class Role(StrEnum):
    WORKER = "worker"  # trains
    ARCHIVE = "archive"  # keeps updates for the verdict horizon


class RunStatus(StrEnum):
    """Where a run is in its life. The coordinator decides; workers obey."""

    DRAFT = "draft"  # being written, or waiting for its text to be prepared
    RECRUITING = "recruiting"  # launched: the spec is fixed; waits for enough machines
    TRAINING = "training"
    PAUSED = "paused"  # workers keep their state and stay connected, and take no steps
    FINISHED = "finished"  # the budget is spent and the final checkpoint is safe
    CANCELLED = "cancelled"


class Activity(StrEnum):
    PREPARING = "preparing"  # building the text, or fetching it
    JOINING = "joining"  # fetching the anchor
    TRAINING = "training"
    PAUSED = "paused"
    FINISHING = "finishing"  # budget spent; waiting until everybody has every update
    FINISHED = "finished"  # final checkpoint whole on this machine
    LEFT = "left"
