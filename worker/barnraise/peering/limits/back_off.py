"""Pause longer each time that something fails. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackOff:
    """A pause that doubles with each failure.

    Attributes:
        first_seconds: The pause before any doubling.
        most_seconds: The longest pause.
    """

    first_seconds: float
    most_seconds: float

    def pause_seconds(self, doublings: int) -> float:
        """Return the pause after so many doublings.

        Their number is bounded: a peer may be gone for weeks, and no float is as large as 2¹⁰²⁴.
        """
        return min(self.most_seconds, self.first_seconds * 2.0 ** min(doublings, 20))
