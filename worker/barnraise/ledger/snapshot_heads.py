"""Validate the headers at which a snapshot stands, as strictly as those of single updates.

Each author's last header must be one that every peer accepts: signed, with a ticket, and with a
total that its updates can reach. Where this ledger has updates of the author, the header must
continue them.
"""

from collections.abc import Iterable

from pydantic import TypeAdapter, ValidationError

from barnraise.errors import MessageError
from barnraise.ledger.ledger import Ledger, LedgerHead
from barnraise.ledger.validation import UpdateRules, validate_header
from barnraise.protocol.messages import Signed, Update
from barnraise.protocol.signing import digest, open_signed

_signed_documents = TypeAdapter(list[Signed])


def read_signed(data: bytes) -> list[Signed]:
    """Return the signed documents in a blob of a snapshot.

    Raises:
        MessageError: When it is not a list of them.
    """
    try:
        return _signed_documents.validate_json(data)
    except ValidationError:
        raise MessageError("a snapshot's heads or tickets are not a list of documents") from None


def read_heads(data: bytes, run: str, vector: dict[str, int]) -> list[tuple[Signed, Update]]:
    """Return the headers in a snapshot's blob of heads.

    Raises:
        MessageError: When they are not signed, or not exactly the last ones of `vector`.
    """
    signed = read_signed(data)
    heads = [(header, open_signed(header, "update", Update, key=header.key)) for header in signed]
    if any(update.peer != header.key or update.run != run for header, update in heads):
        raise MessageError("a snapshot's heads are of another run, or not signed by their authors")
    if len(heads) != len(vector) or {update.author: update.seq for _, update in heads} != vector:
        raise MessageError("a snapshot's heads are not those of its version vector")
    return heads


def validate_heads(
    heads: list[tuple[Signed, Update]],
    tickets: Iterable[Signed],
    ledger: Ledger,
    rules: UpdateRules,
) -> list[Signed]:
    """Check that each author's last header in a snapshot would be accepted as an update.

    Returns:
        The tickets that the heads name.

    Raises:
        MessageError: When a head does not count, with the reason.
    """
    by_digest = {digest(ticket.body): ticket for ticket in tickets}
    named: list[Signed] = []
    for signed, update in heads:
        ticket = by_digest.get(update.ticket) or ledger.tickets.get(update.ticket)
        validate_header(signed, ticket, rules)
        assert ticket is not None
        named.append(ticket)
        _validate_chain(signed, update, ledger, rules)
    return named


def _validate_chain(signed: Signed, update: Update, ledger: Ledger, rules: UpdateRules) -> None:
    """Raise MessageError unless a head continues, or is, what this ledger has of its author."""
    name = f"update {update.seq} of {update.peer[:8]} in a snapshot"
    stored = ledger.header(update.author, update.seq)
    if stored is not None and stored.body != signed.body:
        raise MessageError(f"{name} is not the one that is here")
    head = ledger.head(update.author)
    count = update.seq - head.seq
    if head == LedgerHead() or count <= 0:
        return
    is_next = update.previous == head.digest and head.is_continued_by(update)
    is_reachable = (
        update.tokens <= update.total - head.total <= count * rules.max_tokens
        and head.is_crew_continued_by(update)
        and update.started_ms == head.started_ms
        and update.time_ms > head.time_ms
    )
    if not (is_next if count == 1 else is_reachable):
        raise MessageError(f"{name} does not continue what is here of its author")
