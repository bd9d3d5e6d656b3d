"""Headers of updates as their authors sign them, valid but for the fields that a test changes."""

from helpers.updates.tickets import RUN

from barnraise.protocol.messages import FragmentUpdate, Signed, Update
from barnraise.protocol.signing import Identity, digest

GENESIS_DIGEST = digest("")  # without an import of the ledger, which needs torch
PART = FragmentUpdate(digest="a" * 64, size=20, sketch="0" * 16)


def build_update(peer: str, seq: int = 1, /, **changed) -> Update:
    """Return a key's update without fragments: one of its updates a second, of equal tokens.

    Args:
        peer: The author's key.
        seq: Its number; the ones before it state as many tokens.
        changed: Fields that differ.
    """
    tokens = changed.get("tokens", 10)
    fields = {
        "run": RUN,
        "peer": peer,
        "incarnation": "0" * 16,
        "seq": seq,
        "started_ms": 0,
        "time_ms": 1000 * seq,
        "ticket": "0" * 64,
        "previous": GENESIS_DIGEST,
        "tokens": tokens,
        "total": tokens * seq,
        "fragments": [],
    }
    return Update(**(fields | changed))


def sign_chain(identity: Identity, count: int, **changed) -> list[tuple[Signed, Update]]:
    """Return signed headers of one author; each continues the one before it."""
    headers: list[tuple[Signed, Update]] = []
    previous = GENESIS_DIGEST
    for seq in range(1, count + 1):
        update = build_update(identity.key, seq, previous=previous, **changed)
        signed = identity.sign("update", update)
        previous = digest(signed.body)
        headers.append((signed, update))
    return headers
