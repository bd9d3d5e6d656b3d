"""Interpolate the steps in which a training reaches a loss. Pure."""

import itertools
import math


def interpolate_steps(points: list[tuple[int, float]], loss: float) -> float | None:
    """Return the steps to a loss, interpolated in their logarithm.

    Args:
        points: (steps, loss) of trainings, in ascending order of steps.
        loss: the loss to reach. A higher one than that of the fewest steps counts as theirs.

    Returns:
        None below the lowest loss.
    """
    if points and loss > points[0][1]:
        return float(points[0][0])
    for (few, high), (many, low) in itertools.pairwise(points):
        if low < high and low <= loss <= high:
            part = (high - loss) / (high - low)
            return math.exp(math.log(few) + part * math.log(many / few))
    return None
