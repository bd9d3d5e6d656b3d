"""Compare the validation losses of two runs at equal tokens of honest machines. Pure."""

import json
from bisect import bisect_left
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import mean

GRID_POINTS = 16  # positions at which two runs are compared
COMPARED_SHARE = 0.5  # of the tokens: the comparison begins after this part of the training

Curve = Sequence[tuple[int, float]]  # (tokens, loss), ascending


def read_curve(path: Path, honest_keys: Collection[str]) -> list[tuple[int, float]]:
    """Read a machine's log of evaluations (`drill_worker.DrillWorker`).

    Args:
        path: The log.
        honest_keys: The machines whose tokens count.

    Returns:
        (honest tokens in the anchor, validation loss), ascending.
    """
    if not path.exists():
        return []
    points: dict[int, float] = {}
    for line in path.read_text().split("\n")[:-1]:
        loss, totals = json.loads(line)
        tokens = sum(n for author, n in totals.items() if author.partition(".")[0] in honest_keys)
        points[tokens] = loss
    return sorted(points.items())


def loss_at(curve: Curve, tokens: float) -> float:
    """Return the loss at a number of tokens, interpolated; the first or last one outside."""
    index = bisect_left(curve, tokens, key=lambda point: point[0])
    if index == 0:
        return curve[0][1]
    if index == len(curve):
        return curve[-1][1]
    (left, left_loss), (right, right_loss) = curve[index - 1], curve[index]
    return left_loss + (right_loss - left_loss) * (tokens - left) / (right - left)


def mean_loss(curves: Sequence[Curve], tokens: float) -> float:
    """Return the mean of several machines' losses at a number of tokens."""
    return mean(loss_at(curve, tokens) for curve in curves)


def relative_gap(reference: Sequence[Curve], attacked: Sequence[Curve]) -> float:
    """Return by how much the losses of one run exceed those of another.

    They are compared at equal tokens, in the later part of what both runs trained.

    Args:
        reference: A curve for each machine of the run to compare with.
        attacked: A curve for each machine of the other run.

    Returns:
        The mean of (attacked − reference) / reference.
    """
    last = min(curve[-1][0] for curve in (*reference, *attacked))
    positions = [
        last * (COMPARED_SHARE + (1 - COMPARED_SHARE) * n / (GRID_POINTS - 1))
        for n in range(GRID_POINTS)
    ]
    return mean(mean_loss(attacked, at) / mean_loss(reference, at) - 1 for at in positions)
