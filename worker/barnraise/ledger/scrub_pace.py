"""How much of the time verifying may take. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScrubPace:
    """The pauses of a check that runs in the background over and over."""

    min_pause_seconds: float  # between two parts of the check
    # Of the time, which reading may take: a slow part is followed by a longer pause.
    time_share: float = 0.005

    def pause_seconds(self, seconds: float) -> float:
        """Return the pause after a part of the check that took so long."""
        return max(self.min_pause_seconds, seconds / self.time_share)
