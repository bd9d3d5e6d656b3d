"""Compute the memory that averaging weights with neighbours takes besides a plan. Pure."""

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class SmallerMachine:
    """A machine without the part that is reserved.

    Attributes:
        hardware: with less memory.
        limits: with less memory, if they limit it.
    """

    hardware: Hardware
    limits: Limits


def mixing_bytes(model: ModelSpec, recipe: Recipe) -> int:
    """Return the bytes of RAM that a machine needs to average with one neighbour a step.

    Topologies with more neighbours a step need `RECEIVED_COPIES` more for each; they are for
    machines with plenty of memory.
    """
    elements = sum(fragment.size for fragment in model.fragments())
    payload = elements * recipe.mixing_bits // 8
    copies = (SENT_COPIES + RECEIVED_COPIES) * payload
    return EXACT_COPIES * FLOAT_BYTES * elements + copies


def reserve_memory(hardware: Hardware, limits: Limits, size: int) -> SmallerMachine:
    """Return a machine and its limits with so many bytes of RAM less."""
    available = hardware.memory_available
    return SmallerMachine(
        replace(
            hardware,
            memory=max(0, hardware.memory - size),
            memory_available=max(1, available - size) if available else 0,
        ),
        replace(limits, memory=None if limits.memory is None else max(0, limits.memory - size)),
    )
