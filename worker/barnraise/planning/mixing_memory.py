"""Compute the memory that agreeing with other machines in steps takes besides a plan. Pure."""

from dataclasses import replace

from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.spec import ModelSpec, Recipe

# Copies of all weights in 32 bits: the replica as it is sent, as the neighbours decode it, its
# bytes for machines that join, the group's mean, and one that is being added to it.
EXACT_COPIES = 5
# Copies in the payload's bits: the one that is sent; of a neighbour's, two that are stored, one
# that arrives and one that is decoded.
SENT_COPIES = 1
RECEIVED_COPIES = 4
FLOAT_BYTES = 4
MEAN_COPIES = 1  # with moments that absorb the mean gradient of several steps: that mean
# Elements that are updated at a time while moments are copied; a multiple of all block sizes.
MOVED_ELEMENTS = 1 << 22
MOVED_COPIES = 3  # both moments, and weights that do not move


def mixing_bytes(model: ModelSpec, recipe: Recipe) -> int:
    """Return the bytes of RAM that a machine needs to average with one neighbour a step.

    Topologies with more neighbours a step need `RECEIVED_COPIES` more for each; they are for
    machines with plenty of memory.
    """
    elements = sum(fragment.size for fragment in model.fragments())
    payload = elements * recipe.mixing_bits // 8
    copies = (SENT_COPIES + RECEIVED_COPIES) * payload
    return EXACT_COPIES * FLOAT_BYTES * elements + copies + mean_gradient_bytes(model, recipe)


def mean_gradient_bytes(model: ModelSpec, recipe: Recipe) -> int:
    """Return the bytes, of RAM or of the device, for gradients that moments have not absorbed.

    With them come the copies of the moments of as many elements as are updated at a time.
    """
    if recipe.mixing_accumulation == 1:
        return 0
    sizes = [fragment.size for fragment in model.fragments()]
    copied = MOVED_COPIES * min(max(sizes), MOVED_ELEMENTS)
    return FLOAT_BYTES * (MEAN_COPIES * sum(sizes) + copied)


def reserve_memory(
    hardware: Hardware, limits: Limits, size: int, device_size: int = 0
) -> tuple[Hardware, Limits]:
    """Return a machine and its limits, if they limit it, with less memory.

    It has `size` bytes of RAM less and, if it has a GPU, `device_size` bytes of that one's memory.
    """
    available = hardware.memory_available
    free = hardware.device_memory_free
    return (
        replace(
            hardware,
            memory=max(0, hardware.memory - size),
            memory_available=max(1, available - size) if available else 0,
            device_memory=max(0, hardware.device_memory - device_size),
            device_memory_free=max(1, free - device_size) if free else 0,
            others=tuple(
                reserve_memory(other, limits, size, device_size)[0] for other in hardware.others
            ),
        ),
        replace(
            limits,
            memory=_reduce(limits.memory, size),
            device_memory=_reduce(limits.device_memory, device_size),
        ),
    )


def _reduce(limit: int | None, size: int) -> int | None:
    return None if limit is None else max(0, limit - size)
