"""Choose which pieces of a text are held out for validation. Pure."""

import numpy as np
import numpy.typing as npt

CANDIDATES_FACTOR = 2.0  # pieces that are looked at, as a multiple of the share
ALL_CANDIDATES = 100_000  # up to so many pieces, all are looked at


def choose_held_out(
    keys: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint32],
    used: npt.NDArray[np.bool_],
    share: float,
    least_bytes: int = 1,
) -> npt.NDArray[np.bool_]:
    """Choose whole pieces in the order of their keys until the share of the bytes is reached.

    A piece that would exceed it stays in training, unless the rest is less than `least_bytes`. Each
    side gets at least one piece.

    Args:
        keys: random numbers that depend on nothing but the content.
        lengths: bytes of each piece.
        used: the pieces that count.
        share: of the bytes to hold out.
        least_bytes: to hold out, if there are twice as many in all.

    Returns:
        For each piece whether it is held out.
    """
    total = int(lengths[used].sum(dtype=np.int64))
    target = max(int(share * total), min(least_bytes, total // 2))
    candidates = np.flatnonzero(used)
    if len(candidates) > ALL_CANDIDATES:
        bound = min(1.0, CANDIDATES_FACTOR * target / total)
        candidates = candidates[keys[candidates] <= np.uint64(int(bound * (2**64 - 1)))]
    order = candidates[np.argsort(keys[candidates], kind="stable")]
    held_out = np.zeros(len(keys), np.bool_)
    left = target
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if length <= left:
            left -= length
            held_out[index] = True
    missing = min(least_bytes, total // 2) - (target - left)
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if missing > 0 and not held_out[index]:
            held_out[index] = True
            missing -= length
    if not held_out.any():
        held_out[order[int(np.argmin(lengths[order]))]] = True
    if int(held_out.sum()) == int(used.sum()):
        held_out[order[-1]] = False
    return held_out
