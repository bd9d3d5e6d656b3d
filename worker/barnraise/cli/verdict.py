"""Run `barnraise verdict`: the owner of a run removes harmful updates and their authors."""

import contextlib
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from barnraise.cli.addresses import RunArgument
from barnraise.cli.console import new_table, out
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.cli.option_groups import option
from barnraise.cli.run_folders import refuse_unknown_run
from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import MAX_AUTHORS, SignedVerdict, Verdict

if TYPE_CHECKING:
    from barnraise.ledger.ledger import Ledger

KEY = re.compile(r"[0-9a-f]{64}")
MIN_KEY_DIGITS = 8  # of the beginning of a key that names a peer
AUTHOR_LENGTH = 81  # characters of KEY.INCARNATION
ExcludedParty = Literal["machine", "volunteer"]


@dataclass(frozen=True)
class ExclusionOptions:
    """Whether the peer is excluded or cleared, and where this machine's state is."""

    exclude: ExcludedParty | None = option(
        None, "Exclude the peer, or its volunteer with all machines, for good."
    )
    clear: bool = option(False, "Let the updates of the peer's suspended volunteer count again.")
    keep: bool = option(False, "Keep the updates that an excluded peer has published so far.")
    home: HomeOption = None


def verdict(
    run: RunArgument,
    peer: Annotated[
        str,
        typer.Option(
            help="Whose updates: a machine's key or its beginning; KEY.INCARNATION for one."
        ),
    ] = "",
    after: Annotated[
        int, typer.Option(min=0, help="The last update of that peer that stays; 0: none.")
    ] = 0,
    update: Annotated[
        list[str] | None,
        typer.Option(help="Remove one update, KEY.INCARNATION:NUMBER; repeatable."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason, for everybody to read.")] = "",
    *,
    exclusion: ExclusionOptions,
) -> None:
    """Remove updates from a run that this machine owns, or exclude or clear a peer.

    Without --peer or --update, it lists the peers and their updates.
    """
    state_dir = open_state_dir(exclusion.home)
    # Importing torch takes seconds: what can be refused is refused before.
    refuse_unknown_run(state_dir, run.name)
    from barnraise.exchange.verdicts.verdict_handler import VERDICT_FOLDER
    from barnraise.ledger.ledger import Ledger
    from barnraise.spec import RunSpec
    from barnraise.training.join import find_saved_run

    saved_run = find_saved_run(state_dir, run.name)
    if saved_run is None:
        raise StateError(f"this machine has never worked on '{run.name}'")
    spec = RunSpec.from_json(saved_run.spec)
    folder = state_dir.path / "runs" / saved_run.id
    # A worker may be using the ledger at the same time, so that nothing is deleted from it.
    with contextlib.closing(Ledger(folder, sweep=False)) as ledger:
        if not peer and not update:
            _print_authors(ledger)
            return
        own_key = state_dir.identity.key
        if own_key != spec.owner:
            raise StateError(
                f"verdicts on '{run.name}' are signed by the machine {spec.owner[:8]}, "
                f"which prepared its text; this one is {own_key[:8]}"
            )
        if exclusion.clear:
            cleared = find_excluded(ledger, "volunteer", peer).volunteer
            message = Verdict(
                run=saved_run.id,
                cleared=[cleared] if cleared else [],
                reason=reason[:100],
                issued=time.time(),
            )
        elif exclusion.exclude:
            excluded = find_excluded(ledger, exclusion.exclude, peer)
            horizon = None if exclusion.keep else spec.verdict_horizon
            message = build_exclusion(ledger, saved_run.id, excluded, horizon, reason)
        else:
            cuts = dict.fromkeys(_find_authors(ledger, peer, after), after) if peer else {}
            singles = _parse_author_updates(update or [])
            message = build_verdict(
                ledger, saved_run.id, cuts, singles, spec.verdict_horizon, reason
            )
    signed = state_dir.identity.sign("verdict", message)
    signed_verdict = SignedVerdict(body=signed.body, signatures={signed.key: signed.signature})
    write_atomically(
        folder / VERDICT_FOLDER / f"{digest(signed.body)}.json",
        signed_verdict.model_dump_json().encode(),
    )
    out.print(
        "Signed. This machine's worker sends it to the others: now, if it is running, or at its "
        "next start."
    )


def build_verdict(
    ledger: "Ledger",
    run: str,
    cuts: Mapping[str, int],
    singles: Mapping[str, Iterable[int]],
    horizon: int,
    reason: str = "",
) -> Verdict:
    """Build the verdict that removes the updates of some authors from a run.

    Of the authors in `cuts`, the update named there is the last that stays; `singles` lists the
    numbers of single updates to remove. `horizon` is the age that an update may have, in rounds of
    all other machines.

    Raises:
        StateError: an update is not in the ledger, nobody may have its payload any longer, or it
            is older than the horizon.
    """
    removed = [
        (author, number)
        for author, last in cuts.items()
        for number in range(last + 1, ledger.head(author).seq + 1)
    ]
    removed += [(author, number) for author, numbers in singles.items() for number in numbers]
    if not removed:
        raise StateError(
            "there is no such update in this machine's ledger: nothing would be removed"
        )
    tokens: dict[tuple[str, int], int] = {}
    for author, number in removed:
        label = f"update {number} of {author[:8]}"
        update = ledger.update(author, number)
        if update is None or number > ledger.head(author).seq:
            raise StateError(f"{label} is not in this machine's ledger")
        if not ledger.is_within_horizon(author, number, horizon):
            raise StateError(
                f"{label} is too old: verdicts reach back {horizon} rounds of the other machines, "
                "and an hour at least: continue from a checkpoint before it, as a new run"
            )
        if not all(ledger.blobs.has(part.digest) for part in update.fragments):
            raise StateError(
                f"{label} cannot be removed: this machine no longer has its payload, "
                "and maybe no machine has"
            )
        tokens[author, number] = update.tokens
    updates = {
        author: {number: tokens[author, number] for number in numbers}
        for author, numbers in singles.items()
    }
    return Verdict(
        run=run, after=dict(cuts), updates=updates, reason=reason[:100], issued=time.time()
    )


@dataclass(frozen=True)
class Excluded:
    """Whom a verdict excludes: keys, a volunteer, and those of their authors that are known."""

    keys: frozenset[str]
    volunteer: str | None
    authors: tuple[str, ...]


def find_excluded(ledger: "Ledger", party: ExcludedParty, peer: str) -> Excluded:
    """Return the machine of a peer, or its volunteer with all machines.

    `peer` is KEY, its beginning, or KEY.INCARNATION; of a machine that never published the whole
    key.

    Raises:
        StateError: no author matches, or those of several machines do.
    """
    known = sorted(ledger.volunteers)
    matching = [
        author for author in known if len(peer) >= MIN_KEY_DIGITS if author.startswith(peer)
    ]
    keys = frozenset(author.partition(".")[0] for author in matching)
    if party == "machine" and not keys and KEY.fullmatch(peer):
        return Excluded(frozenset([peer]), None, ())
    if len(keys) != 1:
        raise StateError(
            f"{len(keys) or 'no'} machines in this machine's ledger match '{peer}': give the key"
        )
    if party == "machine":
        authors = tuple(author for author in known if author.partition(".")[0] in keys)
        return Excluded(keys, None, authors)
    volunteer = ledger.volunteers[matching[-1]]
    authors = tuple(author for author in known if ledger.volunteers[author] == volunteer)
    return Excluded(frozenset(author.partition(".")[0] for author in authors), volunteer, authors)


def build_exclusion(
    ledger: "Ledger", run: str, excluded: Excluded, horizon: int | None, reason: str = ""
) -> Verdict:
    """Build the verdict that excludes a machine or a volunteer from a run.

    `horizon` is the age in rounds of other machines up to which updates are removed, as far as
    their payloads are here; None: what was published so far stays.
    """
    kept = {author: _last_kept(ledger, author, horizon) for author in excluded.authors}
    largest = sorted(kept, key=lambda author: ledger.head(author).total, reverse=True)
    kept = {author: kept[author] for author in largest[:MAX_AUTHORS] if kept[author]}
    keys = {
        key: {author: last for author, last in kept.items() if author.startswith(key)}
        for key in sorted(excluded.keys)[:MAX_AUTHORS]
    }
    return Verdict(
        run=run,
        keys=keys,
        volunteers={excluded.volunteer: kept} if excluded.volunteer else {},
        reason=reason[:100],
        issued=time.time(),
    )


def _last_kept(ledger: "Ledger", author: str, horizon: int | None) -> int:
    """Return an author's last update that stays: that cannot be removed, or at all."""
    last = ledger.head(author).seq
    if horizon is None:
        return last
    while last:
        update = ledger.update(author, last)
        if (
            update is None
            or not ledger.is_within_horizon(author, last, horizon)
            or not all(ledger.blobs.has(part.digest) for part in update.fragments)
        ):
            break
        last -= 1
    return last


def _find_authors(ledger: "Ledger", peer: str, after: int) -> list[str]:
    """Return the authors of the ledger that belong to one peer.

    `peer` is KEY, its beginning, or KEY.INCARNATION. Unless the last update that stays is 0, the
    peer must be one author, because each incarnation numbers its updates from 1.

    Raises:
        StateError: no author matches, or several do.
    """
    authors: list[str] = []
    if len(peer) >= MIN_KEY_DIGITS:
        authors = [author for author in ledger.vector() if author.startswith(peer)]
    if not authors:
        raise StateError(
            f"no update of '{peer}' is in this machine's ledger; "
            f"at least {MIN_KEY_DIGITS} digits of a key are needed"
        )
    keys = {author.partition(".")[0] for author in authors}
    if len(keys) > 1 or (after and len(authors) > 1):
        candidates = ", ".join(f"{author[:8]}….{author[-16:]}" for author in authors)
        raise StateError(f"'{peer}' may be {candidates}: choose one as KEY.INCARNATION")
    return authors


def _parse_author_updates(texts: list[str]) -> dict[str, list[int]]:
    """Return the numbers of single updates by author.

    Raises:
        StateError: a text is not KEY.INCARNATION:NUMBER.
    """
    numbers: dict[str, list[int]] = {}
    for text in texts:
        author, _, number = text.partition(":")
        if not number.isdecimal() or len(author) != AUTHOR_LENGTH:
            raise StateError(
                f"'{text}' is not KEY.INCARNATION:NUMBER; `barnraise verdict RUN` lists the authors"
            )
        numbers.setdefault(author, []).append(int(number))
    return numbers


def _print_authors(ledger: "Ledger") -> None:
    """Print the authors in the ledger, their updates, and those that are removed already."""
    table = new_table()
    table.add_column("author", overflow="fold")
    for heading in ("updates", "tokens", "removed"):
        table.add_column(heading)
    for author, last in ledger.vector().items():
        removed = ledger.verdicts.singles.get(author, {})
        table.add_row(
            author, str(last), f"{ledger.head(author).total:,}", ", ".join(map(str, removed))
        )
    out.print(table if ledger.vector() else "There are no updates yet.")
