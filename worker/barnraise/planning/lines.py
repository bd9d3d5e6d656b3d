"""Describe the lines that connect machines to the internet, for estimates. Pure.

The site imports this module, so it imports nothing but the standard library.
"""

import math
from dataclasses import dataclass, replace

BITS_PER_BYTE = 8
MEGABIT = 10**6


@dataclass(frozen=True)
class Line:
    """A line between one machine and the core of the internet.

    Attributes:
        name: how estimates call it.
        up_megabits: Mb/s from the machine.
        down_megabits: Mb/s to the machine.
        round_trip_seconds: of a small packet from the machine to a server nearby and back.

    Raises:
        ValueError: A rate is not above zero, or the round trip is negative.
    """

    name: str
    up_megabits: float
    down_megabits: float
    round_trip_seconds: float = 0.0

    def __post_init__(self) -> None:
        for direction, rate in (("up", self.up_megabits), ("down", self.down_megabits)):
            if not (rate > 0 and math.isfinite(rate)):
                raise ValueError(
                    f"the line carries {rate:g} Mb/s {direction}: no machine can exchange over it; "
                    "state a rate above zero"
                )
        if not (self.round_trip_seconds >= 0 and math.isfinite(self.round_trip_seconds)):
            raise ValueError(
                f"a round trip of {self.round_trip_seconds:g} s is impossible; state 0 or more"
            )

    @property
    def up_bytes(self) -> float:
        """Return the bytes per second from the machine."""
        return self.up_megabits * MEGABIT / BITS_PER_BYTE

    @property
    def down_bytes(self) -> float:
        """Return the bytes per second to the machine."""
        return self.down_megabits * MEGABIT / BITS_PER_BYTE

    @property
    def delay_seconds(self) -> float:
        """Return the seconds of a small packet from one machine to another on such lines.

        It crosses both lines once, each in half of the line's round trip.
        """
        return self.round_trip_seconds

    @property
    def spelling(self) -> str:
        """Return the line as `parse_line` reads it."""
        milliseconds = 1000 * self.round_trip_seconds
        return f"{self.up_megabits:g}/{self.down_megabits:g}/{milliseconds:g}"

    def __str__(self) -> str:
        if self.up_megabits == self.down_megabits:
            return f"{self.up_megabits:,g} Mb/s both ways"
        return f"{self.up_megabits:,g} Mb/s up, {self.down_megabits:,g} down"


# The global median of fixed lines. Estimates assume it unless another line is chosen.
HOME_LINE = Line("Home line", 15, 112, 0.023)
LINES = (
    HOME_LINE,
    Line("Fast line", 100, 100, 0.010),
    Line("Gigabit", 1_000, 1_000, 0.002),
)
CLUSTER_LINE = Line("Cluster", 10_000, 10_000, 0.0001)


def parse_line(text: str) -> Line:
    """Return the line of a text such as "15/112", "15/112/23" or "1000".

    Args:
        text: Mb/s up, Mb/s down (by default as much) and the round trip in milliseconds (by default
            that of the home line), separated by slashes.

    Raises:
        ValueError: The text is not a line, or its rates are impossible.
    """
    try:
        numbers = [float(part) for part in text.split("/")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3:
        raise ValueError(
            f"'{text[:40]}' is not a line: state Mb/s up, down and the round trip in milliseconds, "
            "as in 15/112/23"
        )
    up = numbers[0]
    down = numbers[1] if len(numbers) > 1 else up
    round_trip = numbers[2] / 1000 if len(numbers) > 2 else HOME_LINE.round_trip_seconds
    line = Line("Stated line", up, down, round_trip)
    return HOME_LINE if replace(line, name=HOME_LINE.name) == HOME_LINE else line
