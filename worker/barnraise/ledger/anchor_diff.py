"""Compute what leads from one anchor to another: the updates to add, to subtract and to leave out.

An anchor is described by its version vector and by `retracted`: the single updates that verdicts
took out of what the vector covers. This module reads a ledger and changes nothing.
"""

from collections.abc import Mapping

from barnraise.ledger.anchor import Retracted, Retraction
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.protocol.messages import Update


def anchor_retractions(
    ledger: Ledger, vector: Mapping[str, int], retracted: Retracted
) -> list[Retraction]:
    """Return what the ledger's verdicts take out of an anchor, each author's last update first.

    A single update that no verdict retracts any longer is added again.

    All headers that this needs must be here, see `missing_headers`.
    """
    result: list[Retraction] = []
    verdicts = ledger.verdicts
    for author, last in vector.items():
        already_out = retracted.get(author, {})
        limit = verdicts.last_valid(author, last)
        singles = verdicts.singles_of(author)
        for seq in range(last, limit, -1):
            update = ledger.update(author, seq)
            previous = ledger.update(author, seq - 1)
            assert update is not None and (previous is not None or seq == 1), (
                "the headers must be here, see `missing_headers`"
            )
            result.append(Retraction(update, 0 if seq in already_out else -1, False, previous))
        for seq, tokens in singles.items():
            if seq <= limit and seq not in already_out:
                update = ledger.update(author, seq)
                assert update is not None, "the headers must be here, see `missing_headers`"
                result.append(Retraction(update, -1, True, tokens=tokens))
        for seq in already_out:
            update = ledger.update(author, seq)
            if seq <= limit and seq not in singles and update is not None:
                result.append(Retraction(update, 1, True))
    return result


def missing_headers(ledger: Ledger, verdicts: VerdictSet) -> list[tuple[str, int, int]]:
    """Return the headers from before the ledger's base that applying `verdicts` needs.

    Returns:
        (author, first, last) for each range of sequence numbers.
    """
    missing: list[tuple[str, int, int]] = []
    merged = (ledger.verdicts | verdicts).bind(ledger.volunteers, ledger.newcomers)
    base_retracted = ledger.base.retracted()
    for _, head in ledger.base.heads():
        author = head.author
        limit = merged.last_valid(author, head.seq)
        singles = set(merged.singles_of(author)) - set(base_retracted.get(author, {}))
        first = min((seq for seq in {max(1, limit)} | singles if seq < head.seq), default=head.seq)
        last = head.seq - 1
        while last >= first and ledger.header(author, last) is not None:
            last -= 1
        if last >= first:
            missing.append((author, first, last))
    return missing


def updates_between(
    ledger: Ledger,
    start: Mapping[str, int],
    start_retracted: Retracted,
    end: Mapping[str, int],
    end_retracted: Retracted,
) -> list[tuple[Update, int]] | None:
    """Return the updates that turn one anchor into another.

    Returns:
        (update, multiplier), with 1 to add the update and -1 to subtract it; None if a header is
        not here.
    """
    result: list[tuple[Update, int]] = []
    for author in sorted(start.keys() | end.keys()):
        first, last = sorted((start.get(author, 0), end.get(author, 0)))
        out_before = start_retracted.get(author, {})
        out_after = end_retracted.get(author, {})
        for seq in sorted({*range(first + 1, last + 1), *out_before, *out_after}):
            is_in_start = seq <= start.get(author, 0) and seq not in out_before
            is_in_end = seq <= end.get(author, 0) and seq not in out_after
            if is_in_start == is_in_end:
                continue
            update = ledger.update(author, seq)
            if update is None:
                return None
            result.append((update, 1 if is_in_end else -1))
    return result
