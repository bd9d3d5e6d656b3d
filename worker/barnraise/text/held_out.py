"""Choose pieces of a text by their keys, above all those held out for validation. Pure."""

import numpy as np
import numpy.typing as npt

from barnraise.text.spool import BLOCK

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
    total = int(np.sum(lengths, where=used, dtype=np.int64))
    target = max(int(share * total), min(least_bytes, total // 2))
    bound = 1.0
    if int(used.sum()) > ALL_CANDIDATES:
        bound = min(1.0, CANDIDATES_FACTOR * target / total)
    candidates = find_below(keys, used, bound)
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


def find_below(
    keys: npt.NDArray[np.uint64], chosen: npt.NDArray[np.bool_], bound: float
) -> npt.NDArray[np.int64]:
    """Return the indices of the chosen pieces whose keys are in the lowest part, 0 to 1."""
    greatest = np.uint64(min(2**64 - 1, int(bound * (2**64 - 1))))
    found = [np.empty(0, np.int64)]
    for begin in range(0, len(keys), BLOCK):
        block = slice(begin, begin + BLOCK)
        found.append(begin + np.flatnonzero(chosen[block] & (keys[block] <= greatest)))
    return np.concatenate(found)


def find_smallest(
    keys: npt.NDArray[np.uint64], chosen: npt.NDArray[np.bool_], count: int
) -> npt.NDArray[np.int64]:
    """Return the indices of the `count` chosen pieces with the smallest keys, in their order."""
    total = int(chosen.sum())
    count = min(count, total)
    bound = 1.0 if total <= ALL_CANDIDATES else min(1.0, CANDIDATES_FACTOR * count / total)
    candidates = find_below(keys, chosen, bound)
    while len(candidates) < count:
        bound = min(1.0, 2 * bound)
        candidates = find_below(keys, chosen, bound)
    return candidates[np.argsort(keys[candidates], kind="stable")[:count]]
