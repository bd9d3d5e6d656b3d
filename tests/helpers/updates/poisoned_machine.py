"""A liar: it claims to be far ahead by an author who never published, and has other weights."""

import time

import torch

from barnraise.ledger.anchor import compute_sketch, fragment_to_bytes
from barnraise.ledger.codec import encode
from barnraise.ledger.validation import EMPTY_PART
from barnraise.protocol.messages import FragmentUpdate, Update
from barnraise.protocol.signing import Identity, digest

RUN = "01890000-0000-7000-8000-000000000001"
PHANTOM = Identity(b"p" * 32)  # a ticketed key without a computer
PHANTOM_SEQ = 5000
POISON = 5 << 26  # each weight is 5.0


def poison(machine) -> str:
    """Let a machine serve weights of its choice at a version vector that only liars have.

    Its ledger begins at a snapshot that no update led to, with a valid header of a phantom author.
    Call it before the machine starts.

    Returns:
        The phantom author.
    """
    payload, units = encode(torch.ones(machine.anchor.fragments[0].numel(), dtype=torch.int32))
    part = FragmentUpdate(digest=digest(payload), size=len(payload), sketch=compute_sketch(units))
    count = len(machine.anchor.fragments)
    world = machine.world
    ticket = world.ticket(PHANTOM.key, volunteer=machine.number)
    machine.ledger.tickets.store(ticket)
    header = Update(
        run=RUN,
        peer=PHANTOM.key,
        incarnation="7" * 16,
        seq=PHANTOM_SEQ,
        previous="1" * 64,
        tokens=100,
        total=100 * PHANTOM_SEQ,
        started_ms=int(time.time() * 1000) - 3_600_000,
        time_ms=int(time.time() * 1000) - 10_000,
        volunteer=f"{machine.number:064x}",
        ticket=digest(ticket.body),
        fragments=[part, *[EMPTY_PART] * (count - 1)],
    )
    signed = PHANTOM.sign("update", header)
    fragments = [torch.full_like(units, POISON) for units in machine.anchor.fragments]
    digests = [machine.ledger.blobs.store(fragment_to_bytes(units)) for units in fragments]
    machine.ledger.rebase([(signed, header)], digests)
    machine.anchor.load(fragments, {header.author: header})
    return header.author


def is_poisoned(machine) -> bool:
    """Return whether a machine's weights are the liars'."""
    return bool((machine.anchor.fragments[0] > POISON // 2).any())
