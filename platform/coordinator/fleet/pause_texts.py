"""Why a machine pauses, in words."""

from barnraise.protocol.enums import PauseReason

# What pages say, as what follows a machine's name.
PAUSE_TEXTS = {
    PauseReason.HERE: "paused on the machine itself",
    PauseReason.SITE: "paused on the site by its owner",
    PauseReason.RUN: "paused with its run",
    PauseReason.RECRUITING: "waits for more machines",
    PauseReason.HOURS: "paused by its hours",
    PauseReason.IN_USE: "paused: somebody uses it",
    PauseReason.BATTERY: "paused: on battery",
    PauseReason.BUSY: "paused: other programs use its CPU",
    PauseReason.PROGRAM: "paused: a program runs that goes first",
    PauseReason.HOT: "paused: too hot",
    PauseReason.TRAFFIC: "paused: this month's upload is used up",
    PauseReason.DISK_WRITES: "paused: today's disk writes are used up",
    PauseReason.RULES: "paused: its limits cannot be read",
    PauseReason.OWNER: "waits for the run's owner",
}
