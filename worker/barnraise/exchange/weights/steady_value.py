"""Ignore small changes of a measured value, so that a plan made of it does not flip. Pure."""

MAX_DRIFT = 0.15  # of the lower of two values, by which they may differ and count as the same


class SteadyValue:
    """A measured value that changes only when the measurement has clearly changed.

    The length of a round is a power of two of seconds. Near the edge between two lengths every
    measurement's noise would choose the other one: rounds then end early with little learnt or
    twice as late, and peers estimate this machine's speed from them.
    """

    def __init__(self) -> None:
        """Start without a value."""
        self._value: float | None = None

    def update(self, measured: float) -> float:
        """Return the value after a measurement.

        Args:
            measured: What was measured, 0 or more; inf and 0 differ from all other values.
        """
        value = self._value
        if value is not None and abs(measured - value) <= MAX_DRIFT * min(measured, value):
            return value
        self._value = measured
        return measured
