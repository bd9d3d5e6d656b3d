"""Whether an update counts: a pure function of its signed bytes and the run's spec, the same on every peer for ever.

A peer that refused alone would never agree with the others again, so nothing here looks at a clock, at a revocation or
at what else has arrived: expiry and revocation gate connections only.
"""

from dataclasses import dataclass

import torch

from barnraise.errors import MessageError
from barnraise.exchange.compression.codec import decode, payload_size
from barnraise.exchange.ledger.anchor import compute_sketch
from barnraise.exchange.ledger.blob_store import EMPTY_DIGEST
from barnraise.protocol.messages import FragmentUpdate, Signed, Ticket, Update
from barnraise.protocol.signing import open_signed
from barnraise.spec import RunSpec

EMPTY_PART = FragmentUpdate(
    digest=EMPTY_DIGEST, size=0, sketch="0" * 16
)  # of a fragment whose turn it is not
HEADER, A_FRAGMENT = (
    600,
    200,
)  # bytes that a header needs at most: two of them must fit into one proof of a fork


@dataclass(frozen=True)
class UpdateRules:
    """What of a run decides. `sizes`: each fragment's elements; `mirrors`: keys whose tickets count, and of whom
    `threshold` may give a verdict; so may `owner`. `expelled`: those of them whose tickets open no door any more."""

    run: str
    mirrors: frozenset[str]
    sizes: tuple[int, ...]
    max_tokens: int
    owner: str = ""
    threshold: int = 1
    expelled_mirrors: frozenset[str] = frozenset()

    @classmethod
    def from_spec(cls, spec: RunSpec, run: str, mirrors: frozenset[str]) -> "UpdateRules":
        sizes = tuple(fragment.size for fragment in spec.model.fragments())
        return cls(run, mirrors, sizes, spec.max_tokens_per_update, spec.owner, spec.threshold)


def validate_header(signed: Signed, ticket: Signed | None, rules: UpdateRules) -> Update:
    """The update of a signed header that counts, its payloads apart. Raises MessageError with the reason."""
    update = open_signed(signed, "update", Update, key=signed.key)
    who = f"update {update.seq} of {update.peer[:8]}"
    if update.peer != signed.key:
        raise MessageError(f"{who} is signed by {signed.key[:8]}")
    if update.run != rules.run:
        raise MessageError(f"{who} is for run {update.run}, not {rules.run}")
    if update.tokens > rules.max_tokens:
        raise MessageError(
            f"{who} claims {update.tokens} tokens; the run allows {rules.max_tokens}"
        )
    if len(signed.body.encode()) > HEADER + A_FRAGMENT * len(rules.sizes):
        raise MessageError(
            f"{who} has a header of {len(signed.body)} characters, more than one can need"
        )
    if len(update.fragments) != len(rules.sizes):
        raise MessageError(
            f"{who} has {len(update.fragments)} fragments; the model has {len(rules.sizes)}"
        )
    for index, (part, size) in enumerate(zip(update.fragments, rules.sizes, strict=True)):
        if part.size > payload_size(size):
            raise MessageError(
                f"{who} needs {part.size} bytes for fragment {index} of {size} weights"
            )
        if not part.size and part != EMPTY_PART:
            raise MessageError(
                f"{who} says nothing of fragment {index}, and not as nothing is said"
            )
    if not update.payload_parts:
        raise MessageError(f"{who} says nothing")
    if ticket is None:
        raise MessageError(f"{who} came without a ticket of its author")
    held = open_signed(ticket, "ticket", Ticket)
    if ticket.key not in rules.mirrors or held.mirror != ticket.key:
        raise MessageError(
            f"{who}: its author's ticket is signed by {ticket.key[:8]}, not a mirror of this run"
        )
    if held.run != rules.run or held.peer != update.peer:
        raise MessageError(f"{who}: the ticket with it is for another run or peer")
    return update


def decode_payload(payload: bytes, part: FragmentUpdate, size: int) -> torch.Tensor:
    """The int32[size] that a payload, its digest already checked, decodes to. Raises MessageError unless they have the
    stated sketch."""
    if len(payload) != part.size:
        raise MessageError(f"a payload is of {len(payload)} bytes, and its header says {part.size}")
    units = decode(payload, size)
    if (found := compute_sketch(units)) != part.sketch:
        raise MessageError(f"a payload's checksum is {found}, and its header says {part.sketch}")
    return units
