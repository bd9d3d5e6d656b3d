"""Decide whether an update counts: a pure function of its signed bytes and the run's spec. Pure.

The decision must be the same on every peer for ever, because a peer that alone refused an update
would never agree with the others again. So nothing here depends on a clock, on a revocation or on
what else has arrived. An update states its time and names the ticket that permits it, which bound
the tokens that it may state; its time need only lie within the ticket's, whatever the time is when
it arrives. Revocation affects connections only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from barnraise.errors import MessageError
from barnraise.ledger.anchor import compute_sketch
from barnraise.ledger.blob_store import EMPTY_DIGEST
from barnraise.ledger.codec import decode, payload_size
from barnraise.planning.update_header import max_header_bytes
from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import FragmentUpdate, Signed, Ticket, Update
from barnraise.protocol.run_mirrors import RunMirrors
from barnraise.protocol.signing import ORPHANED_TICKET_GRACE_SECONDS, digest, open_signed
from barnraise.protocol.table_sizes import SOME
from barnraise.spec import RunSpec

GENESIS_DIGEST = digest("")  # the `previous` of an author's first header
# Of an author's time for each of its updates, far less than honest machines take.
MIN_UPDATE_MS = 10
# The part of an update for a fragment that it does not contain.
EMPTY_PART = FragmentUpdate(digest=EMPTY_DIGEST, size=0, sketch="0" * 16)


@dataclass(frozen=True)
class UpdateRules:
    """What decides in a run whether updates and verdicts count."""

    mirrors: RunMirrors  # the run, and the mirrors whose tickets count in it
    sizes: tuple[int, ...]  # the elements of each fragment
    max_tokens: int  # the tokens that one update may state
    owner: str = ""  # key of the run's owner, who may sign verdicts alone

    @classmethod
    def from_spec(cls, spec: RunSpec, run: str, mirrors: frozenset[str]) -> "UpdateRules":
        """Return the rules of a run."""
        sizes = tuple(fragment.size for fragment in spec.model.fragments())
        run_mirrors = RunMirrors(run, mirrors, mirrors, spec.threshold)
        return cls(run_mirrors, sizes, spec.max_tokens_per_update, spec.owner)

    @property
    def run(self) -> str:
        """Return the run's id."""
        return self.mirrors.run

    def with_mirrors(self, mirrors: RunMirrors) -> "UpdateRules":
        """Return the same rules with other mirrors, which change with the mirror list."""
        return replace(self, mirrors=mirrors)


def validate_header(signed: Signed, ticket: Signed | None, rules: UpdateRules) -> Update:
    """Return the update of a signed header, if it counts once its payloads are valid.

    What remains to be checked is that it continues its author's previous update: `validate_claim`.

    Raises:
        MessageError: If it does not count, with the reason.
    """
    update = open_header(signed, rules)
    if ticket is None or digest(ticket.body) != update.ticket:
        raise MessageError(f"{_describe_update(update)} came without the ticket that it names")
    permission = open_ticket(ticket, update.peer, rules)
    if permission.volunteer != update.volunteer:
        raise MessageError(f"{_describe_update(update)} names another volunteer than its ticket")
    if update.newcomer != (permission.standing is Standing.NEWCOMER):
        raise MessageError(f"{_describe_update(update)} states another standing than its ticket")
    if not is_within_ticket(update.time_ms, permission):
        raise MessageError(
            f"{_describe_update(update)} is of a time for which its ticket is not valid"
        )
    validate_claim(update, permission, update.started_ms)
    validate_crew(update)
    if not has_possible_history(update, permission):
        raise MessageError(
            f"{_describe_update(update)} states a start, or {update.total:,} tokens in all, that "
            "its author cannot have"
        )
    return update


def has_possible_history(update: Update, ticket: Ticket) -> bool:
    """Return whether the time since its author's start allows a chain up to this update.

    A header proves its signer, not the updates before it. So its number and its total are bounded
    by its author's time, which begins after the run was created: a run's id is a UUIDv7 (RFC 9562).
    """
    elapsed_ms = update.time_ms - update.started_ms
    most_tokens = ticket.max_tokens_per_second * elapsed_ms // 1000
    begins = update.previous == GENESIS_DIGEST and update.total == update.tokens
    return (
        update.started_ms >= run_created_ms(update.run)
        and update.seq <= (1000 + elapsed_ms) // MIN_UPDATE_MS  # and those of a second at once
        and update.tokens <= update.total <= most_tokens
        and (update.seq > 1 or begins)
    )


def validate_crew(update: Update) -> None:
    """Raise MessageError if the tokens that an update states of its author's crew are impossible.

    Raises:
        MessageError: With the reason.
    """
    keys = [share.key for share in update.crew]
    if keys != sorted(set(keys)) or update.peer in keys:
        raise MessageError(
            f"{_describe_update(update)} does not name each other member of its crew once, in order"
        )
    stated = sum(share.tokens for share in update.crew)
    if stated > update.total:
        raise MessageError(
            f"{_describe_update(update)} states {stated:,} tokens of its crew's members, and "
            f"{update.total:,} in all"
        )


def run_created_ms(run: str) -> int:
    """Return when a run was created, in milliseconds since 1970, by its id."""
    return int(run[:8] + run[9:13], 16)


def open_header(signed: Signed, rules: UpdateRules) -> Update:
    """Return the update of a signed header that has the form of an update of this run.

    Raises:
        MessageError: If it does not have it, with the reason.
    """
    update = open_signed(signed, "update", Update, key=signed.key)
    name = _describe_update(update)
    if update.peer != signed.key:
        raise MessageError(f"{name} is signed by {signed.key[:8]}")
    if update.run != rules.run:
        raise MessageError(f"{name} is for run {update.run}, not {rules.run}")
    if update.tokens > rules.max_tokens:
        raise MessageError(
            f"{name} claims {update.tokens} tokens; the run allows {rules.max_tokens}"
        )
    if len(signed.body.encode()) > max_header_bytes(len(rules.sizes)):
        raise MessageError(
            f"{name} has a header of {len(signed.body)} characters, more than one can need"
        )
    if update.started_ms >= update.time_ms:
        raise MessageError(f"{name} states a time that is not after its author's start")
    validate_parts(update.fragments, name, rules.sizes)
    return update


def open_ticket(signed: Signed, peer: str, rules: UpdateRules) -> Ticket:
    """Return a ticket by which a mirror of the run permitted a key to take part at some time.

    Raises:
        MessageError: If it is not such a ticket, with the reason.
    """
    # Only documents that a mirror is said to have signed are worth remembering.
    if signed.key in rules.mirrors.keys:
        ticket = _open_mirror_ticket(signed.key, signed.body, signed.signature)
    else:
        ticket = open_signed(signed, "ticket", Ticket)
    if signed.key not in rules.mirrors.keys or ticket.mirror != signed.key:
        raise MessageError(
            f"the ticket of {peer[:8]} is signed by {signed.key[:8]}, not a mirror of this run"
        )
    if ticket.run != rules.run or ticket.peer != peer:
        raise MessageError(f"the ticket that came for {peer[:8]} is for another run or peer")
    return ticket


@lru_cache(maxsize=SOME)
def _open_mirror_ticket(key: str, body: str, signature: str) -> Ticket:
    """Return the ticket of a signed document; the result depends on nothing but the document.

    An author names one ticket in hundreds of updates, so verified ones are remembered.

    Raises:
        MessageError: If it is malformed or its signature is wrong.
    """
    return open_signed(Signed(key=key, body=body, signature=signature), "ticket", Ticket)


def validate_claim(update: Update, ticket: Ticket, previous_ms: int) -> None:
    """Raise MessageError if an update states more tokens than its ticket allows for its time.

    Args:
        update: The update.
        ticket: The ticket that it names.
        previous_ms: The time of its author's previous update, in milliseconds since 1970; before
            the first one, the author's start.

    Raises:
        MessageError: If its time is not after the previous one's, or it states too many tokens.
    """
    if update.time_ms <= previous_ms:
        raise MessageError(f"{_describe_update(update)} is not later than the update before it")
    allowed = allowed_tokens(ticket, previous_ms, update.time_ms)
    if update.tokens > allowed:
        raise MessageError(
            f"{_describe_update(update)} states {update.tokens:,} tokens; its ticket and its time "
            f"allow {allowed:,}"
        )


def allowed_tokens(ticket: Ticket, previous_ms: int, time_ms: int) -> int:
    """Return the most tokens that an update may state for the time since its author's last one.

    There is no allowance beyond rate × time. Time before the ticket was issued does not count, so
    that a higher rate applies to no time before it.
    """
    elapsed_ms = max(0, time_ms - max(previous_ms, to_milliseconds(ticket.issued)))
    return ticket.max_tokens_per_second * elapsed_ms // 1000


def to_milliseconds(seconds: float) -> int:
    """Return seconds since 1970 as whole milliseconds, rounded up."""
    return math.ceil(seconds * 1000)


def is_within_ticket(time_ms: int, ticket: Ticket) -> bool:
    """Return whether a ticket permits what was signed at a time: to its expiry and longest grace.

    Machines train on under expired tickets while no mirror answers.
    """
    last_ms = to_milliseconds(ticket.expires + ORPHANED_TICKET_GRACE_SECONDS)
    return to_milliseconds(ticket.issued) <= time_ms <= last_ms


def _describe_update(update: Update) -> str:
    return f"update {update.seq} of {update.peer[:8]}"


def validate_parts(parts: Sequence[FragmentUpdate], name: str, sizes: Sequence[int]) -> None:
    """Raise MessageError unless an update's parts fit the model's fragments, of these sizes.

    Raises:
        MessageError: With the reason.
    """
    if len(parts) != len(sizes):
        raise MessageError(f"{name} has {len(parts)} fragments; the model has {len(sizes)}")
    for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if part.size > payload_size(size):
            raise MessageError(
                f"{name} needs {part.size} bytes for fragment {index} of {size} weights"
            )
        if not part.size and part != EMPTY_PART:
            raise MessageError(
                f"{name}: fragment {index} is empty but is not encoded as an empty part"
            )
    if not any(part.size for part in parts):
        raise MessageError(f"{name} contains no fragment")


def decode_payload(payload: bytes, part: FragmentUpdate, size: int) -> torch.Tensor:
    """Decode a payload whose digest has been verified, and validate it against its header.

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


def decode_parts(
    parts: Sequence[FragmentUpdate],
    sizes: Sequence[int],
    read: Callable[[str], bytes],
    sample: Callable[[int, torch.Tensor], torch.Tensor],
    keep: bool = False,
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Decode the payloads of an update, see `decode_payload`; None stands for an empty part.

    Args:
        parts: One for each fragment.
        sizes: The elements of each fragment.
        read: Returns the payload of a digest.
        sample: Returns the elements of a fragment's units by which the update is judged.
        keep: Whether to return the units.

    Returns:
        The units, int32[size] of each fragment, empty unless they are kept; and the samples.
    """
    units: list[torch.Tensor | None] = []
    samples: list[torch.Tensor | None] = []
    for fragment, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        decoded = decode_payload(read(part.digest), part, size) if part.size else None
        samples.append(None if decoded is None else sample(fragment, decoded))
        if keep:
            units.append(decoded)
    return units, samples
