"""Decide whether an update counts: a pure function of its signed bytes and the run's spec. Pure.

The decision must be the same on every peer for ever, because a peer that alone refused an update
would never agree with the others again. So nothing here depends on a clock, on a revocation or on
what else has arrived; expiry and revocation affect connections only.
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

# The part of an update for a fragment that it does not contain.
EMPTY_PART = FragmentUpdate(digest=EMPTY_DIGEST, size=0, sketch="0" * 16)
# A header's longest encoding in bytes is BASE_HEADER_BYTES + BYTES_PER_FRAGMENT for each fragment.
# Two headers must fit into one proof of a fork.
BASE_HEADER_BYTES = 600
BYTES_PER_FRAGMENT = 200


@dataclass(frozen=True)
class UpdateRules:
    """What decides in a run whether updates and verdicts count.

    Attributes:
        run: The run's id.
        mirrors: Keys of the mirrors whose tickets count.
        sizes: The elements of each fragment.
        max_tokens: The tokens that one update may state.
        owner: Key of the run's owner, who may sign verdicts alone.
        threshold: How many mirrors together may sign a verdict.
        expelled_mirrors: Keys of `mirrors` whose tickets no longer permit a connection.
    """

    run: str
    mirrors: frozenset[str]
    sizes: tuple[int, ...]
    max_tokens: int
    owner: str = ""
    threshold: int = 1
    expelled_mirrors: frozenset[str] = frozenset()

    @classmethod
    def from_spec(cls, spec: RunSpec, run: str, mirrors: frozenset[str]) -> "UpdateRules":
        """Return the rules of a run.

        Args:
            spec: The run's spec.
            run: The run's id.
            mirrors: Keys of the mirrors whose tickets count.
        """
        sizes = tuple(fragment.size for fragment in spec.model.fragments())
        return cls(run, mirrors, sizes, spec.max_tokens_per_update, spec.owner, spec.threshold)


def validate_header(signed: Signed, ticket: Signed | None, rules: UpdateRules) -> Update:
    """Return the update of a signed header, if it counts once its payloads are valid.

    Args:
        signed: The signed header.
        ticket: Its author's ticket.
        rules: The run's rules.

    Raises:
        MessageError: If it does not count, with the reason.
    """
    update = open_signed(signed, "update", Update, key=signed.key)
    name = f"update {update.seq} of {update.peer[:8]}"
    if update.peer != signed.key:
        raise MessageError(f"{name} is signed by {signed.key[:8]}")
    if update.run != rules.run:
        raise MessageError(f"{name} is for run {update.run}, not {rules.run}")
    if update.tokens > rules.max_tokens:
        raise MessageError(
            f"{name} claims {update.tokens} tokens; the run allows {rules.max_tokens}"
        )
    if len(signed.body.encode()) > BASE_HEADER_BYTES + BYTES_PER_FRAGMENT * len(rules.sizes):
        raise MessageError(
            f"{name} has a header of {len(signed.body)} characters, more than one can need"
        )
    _validate_parts(update, name, rules)
    _validate_ticket(update, ticket, name, rules)
    return update


def _validate_parts(update: Update, name: str, rules: UpdateRules) -> None:
    """Raise MessageError unless an update's parts fit the model's fragments."""
    if len(update.fragments) != len(rules.sizes):
        raise MessageError(
            f"{name} has {len(update.fragments)} fragments; the model has {len(rules.sizes)}"
        )
    for index, (part, size) in enumerate(zip(update.fragments, rules.sizes, strict=True)):
        if part.size > payload_size(size):
            raise MessageError(
                f"{name} needs {part.size} bytes for fragment {index} of {size} weights"
            )
        if not part.size and part != EMPTY_PART:
            raise MessageError(
                f"{name}: fragment {index} is empty but is not encoded as an empty part"
            )
    if not update.payload_parts:
        raise MessageError(f"{name} contains no fragment")


def _validate_ticket(update: Update, signed: Signed | None, name: str, rules: UpdateRules) -> None:
    """Raise MessageError unless a mirror of the run permitted the author to take part."""
    if signed is None:
        raise MessageError(f"{name} came without a ticket of its author")
    ticket = open_signed(signed, "ticket", Ticket)
    if signed.key not in rules.mirrors or ticket.mirror != signed.key:
        raise MessageError(
            f"{name}: its author's ticket is signed by {signed.key[:8]}, not a mirror of this run"
        )
    if ticket.run != rules.run or ticket.peer != update.peer:
        raise MessageError(f"{name}: the ticket with it is for another run or peer")


def decode_payload(payload: bytes, part: FragmentUpdate, size: int) -> torch.Tensor:
    """Decode a payload whose digest has been verified, and validate it against its header.

    Args:
        payload: The encoded values.
        part: The header's entry for this fragment.
        size: The elements of the fragment.

    Returns:
        int32[size] in units of 2⁻²⁶.

    Raises:
        MessageError: If the payload is malformed, or its size or checksum differs from the
            header's.
    """
    if len(payload) != part.size:
        raise MessageError(f"a payload is of {len(payload)} bytes, and its header says {part.size}")
    units = decode(payload, size)
    checksum = compute_sketch(units)
    if checksum != part.sketch:
        raise MessageError(f"a payload's checksum is {checksum}, and its header says {part.sketch}")
    return units
