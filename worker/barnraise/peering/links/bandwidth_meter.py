"""Measure a line in a few steps, within bounds on bytes and time. Pure.

A step sends as many bytes as the one before suggests will arrive within a second. So a slow line is
not kept busy for long, and a fast one is measured with more than its first packets.
"""

from dataclasses import dataclass

FIRST_BYTES = 64 << 10  # of the first step
PART_BYTES = 16 << 10  # of each frame
STEP_SECONDS = 1.0  # that a step should last
MAX_SECONDS = 3.0  # after which no step begins
MIN_SECONDS = 0.001  # shorter times are not measurements


@dataclass
class StepMeter:
    """Measure one step where its bytes arrive.

    The bytes of the first part do not count: their time before arrival is not known.

    Attributes:
        size: Bytes after the first part.
        seconds: From the first part to the newest.
    """

    size: int = 0
    seconds: float = 0.0
    _began_at: float | None = None

    def on_part(self, size: int, now: float) -> None:
        """Record that a part arrived at a time in seconds."""
        if self._began_at is None:
            self._began_at = now
        else:
            self.size += size
            self.seconds = now - self._began_at


@dataclass
class LineMeter:
    """Plan the steps of one direction, and conclude from them.

    Attributes:
        max_bytes: That may be sent in all.
        rate: Bytes per second of the last step; 0 before the first.
        sent: Bytes of the steps so far.
        elapsed: Seconds of the steps so far.
    """

    max_bytes: int
    rate: float = 0.0
    sent: int = 0
    elapsed: float = 0.0

    def next_step(self) -> int:
        """Return the bytes of the next step; 0 if the line is measured well enough."""
        left = self.max_bytes - self.sent
        if not self.sent:
            return min(FIRST_BYTES, left)
        wanted = int(min(STEP_SECONDS, MAX_SECONDS - self.elapsed) * self.rate)
        # A step that brings little more than the last one did is not worth its bytes.
        is_worth = self.elapsed < STEP_SECONDS and wanted > FIRST_BYTES
        return min(wanted, left) if is_worth and left > FIRST_BYTES else 0

    def on_step(self, requested: int, measured: StepMeter, seconds: float) -> None:
        """Record a step: its bytes, what its receiver measured, and its seconds with the way."""
        self.sent += requested
        self.elapsed += seconds
        if measured.size and measured.seconds >= MIN_SECONDS:
            self.rate = measured.size / measured.seconds
        elif measured.size:
            self.rate = measured.size / MIN_SECONDS


@dataclass(frozen=True)
class LineRates:
    """How fast the line between this machine and a peer is, in bytes per second; 0: not measured.

    Attributes:
        up: From this machine.
        down: To this machine.
    """

    up: float = 0.0
    down: float = 0.0
