"""Liars, which claim to be far ahead by an author who never published, and honest machines."""

import time
from functools import cache

import torch

from barnraise.ledger.anchor import compute_sketch, fragment_to_bytes
from barnraise.ledger.codec import encode
from barnraise.ledger.validation import EMPTY_PART
from barnraise.protocol.messages import FragmentUpdate, Signed, Update
from barnraise.protocol.signing import Identity, digest

RUN = "01890000-0000-7000-8000-000000000001"
PHANTOM = Identity(b"p" * 32)  # a ticketed key without a computer
PHANTOM_SEQ = 5000
PHANTOM_VOLUNTEER = 99
POISON = 5 << 26  # each weight is 5.0


@cache
def sign_phantom(world) -> tuple[Signed, Signed, Update]:
    """Return the phantom author's ticket and its one header, the same for all liars of a world."""
    size = world.spec.model.fragments()[0].size
    payload, units = encode(torch.ones(size, dtype=torch.int32))
    part = FragmentUpdate(digest=digest(payload), size=len(payload), sketch=compute_sketch(units))
    ticket = world.ticket(PHANTOM.key, volunteer=PHANTOM_VOLUNTEER)
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
        volunteer=f"{PHANTOM_VOLUNTEER:064x}",
        ticket=digest(ticket.body),
        fragments=[part, *[EMPTY_PART] * (len(world.spec.model.fragments()) - 1)],
    )
    return ticket, PHANTOM.sign("update", header), header


def poison(machine) -> str:
    """Let a machine serve weights of its choice at a version vector that only liars have.

    Its ledger begins at a snapshot that no update led to, with a valid header of a phantom author.
    Call it before the machine starts.

    Returns:
        The phantom author.
    """
    ticket, signed, header = sign_phantom(machine.world)
    machine.ledger.tickets.store(ticket)
    fragments = [torch.full_like(units, POISON) for units in machine.anchor.fragments]
    digests = [machine.ledger.blobs.store(fragment_to_bytes(units)) for units in fragments]
    machine.ledger.rebase([(signed, header)], digests)
    machine.anchor.load(fragments, {header.author: header})
    return header.author


def is_poisoned(machine) -> bool:
    """Return whether a machine's weights are the liars'."""
    return bool((machine.anchor.fragments[0] > POISON // 2).any())


def honest_machines(world, *numbers: int, rounds: int = 1):
    """Return machines of as many volunteers that agree on a few rounds of each."""
    machines = [world.machine(n).start() for n in numbers]
    for machine in machines[1:]:
        machine.add_peers(*machines[: machines.index(machine)])
    for _ in range(rounds):
        for seed, machine in enumerate(machines):
            machine.publish_round(seed)
    world.wait_for_agreement(*machines)
    return machines


def liars(world, *numbers: int):
    """Return machines of as many volunteers that serve other weights at a phantom author."""
    machines = [world.machine(n) for n in numbers]
    for machine in machines:
        poison(machine)
        machine.start()
    return machines


def list_anchor(*machines) -> dict[str, str]:
    """Return what a site lists once it confirms the anchor that machines have now."""
    for machine in machines:
        machine.exchange.remember_vector(machine.anchor)
    return {machines[0].anchor.vector_digest(): machines[0].anchor.digest()}
