"""What leads from one anchor to another, read out of a ledger: updates that go in, come out, or stay out.

An anchor is told by its version vector and its holes: the single updates that verdicts took out of what the vector
covers. Nothing here changes anything.
"""

from collections.abc import Mapping

from barnraise.exchange.ledger.anchor import Retracted, Retraction
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.ledger.verdicts import VerdictSet
from barnraise.protocol.messages import Update


def anchor_entry(update: Update, verdicts: VerdictSet) -> Update | Retraction:
    """What an anchor is to note of its author's next update: the update, or that it stays out."""
    tokens = verdicts.singles.get(update.author, {}).get(update.seq)
    return update if tokens is None else Retraction(update, 0, True, tokens=tokens)


def retractions(ledger: Ledger, vector: Mapping[str, int], holes: Retracted) -> list[Retraction]:
    """What must come out of an anchor at `vector` without `holes`, of each author from the last back."""
    found, verdicts = [], ledger.verdicts
    for author, last in vector.items():
        gone, limit = holes.get(author, {}), min(last, verdicts.limits.get(author, last))
        for seq in range(last, limit, -1):
            update, before = ledger.update(author, seq), ledger.update(author, seq - 1)
            assert update is not None and (before is not None or seq == 1), (
                "headers first: see `lacking`"
            )
            found.append(Retraction(update, 0 if seq in gone else -1, False, before))
        for seq, tokens in verdicts.singles.get(author, {}).items():
            if seq <= limit and seq not in gone:
                update = ledger.update(author, seq)
                assert update is not None, "headers first: see `lacking`"
                found.append(Retraction(update, -1, True, tokens=tokens))
    return found


def missing_headers(ledger: Ledger, found: VerdictSet) -> list[tuple[str, int, int]]:
    """(author, first, last) of headers from before the ledger's base without which `found` cannot be heeded."""
    lacks: list[tuple[str, int, int]] = []
    merged, holes = ledger.verdicts | found, ledger.base_retracted()
    for _, head in ledger.base_heads():
        author, limit = head.author, min(head.seq, merged.limits.get(head.author, head.seq))
        singles = set(merged.singles.get(author, {})) - set(holes.get(author, {}))
        first = min((seq for seq in {max(1, limit)} | singles if seq < head.seq), default=head.seq)
        last = head.seq - 1
        while last >= first and ledger.header(author, last) is not None:
            last -= 1
        if last >= first:
            lacks.append((author, first, last))
    return lacks


def updates_between(
    ledger: Ledger,
    start: Mapping[str, int],
    gone: Retracted,
    end: Mapping[str, int],
    out: Retracted,
) -> list[tuple[Update, int]] | None:
    """From an anchor at `start` without `gone` to one at `end` without `out`: (update, by how much it is added: 1 or
    -1). None when a header that it takes is not here."""
    found = []
    for author in sorted(start.keys() | end.keys()):
        a, b = start.get(author, 0), end.get(author, 0)
        before, after = gone.get(author, {}), out.get(author, {})
        for seq in sorted({*range(min(a, b) + 1, max(a, b) + 1), *before, *after}):
            times = (seq <= b and seq not in after) - (seq <= a and seq not in before)
            if times and (update := ledger.update(author, seq)) is None:
                return None
            if times:
                found.append((update, times))
    return found
