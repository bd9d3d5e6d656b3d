"""`barnraise verdict`: the owner of a run takes harmful updates out of it again."""

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from barnraise.cli.plan import HomeOption
from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import SignedVerdict, Verdict
from barnraise.state_dir import StateDir

if TYPE_CHECKING:
    from barnraise.exchange.ledger.ledger import Ledger

app = typer.Typer()
out = Console(highlight=False)


@app.command()
def verdict(
    run: Annotated[str, typer.Argument(help="The run's id, or its name in its address.")],
    peer: Annotated[
        str,
        typer.Option(help="Whose updates: a machine's key, or its beginning; KEY.LIFE for one."),
    ] = "",
    after: Annotated[
        int, typer.Option(min=0, help="The last update of that peer that stays; 0: none.")
    ] = 0,
    update: Annotated[
        list[str] | None, typer.Option(help="A single one, as KEY.LIFE:NUMBER; may be repeated.")
    ] = None,
    reason: Annotated[str, typer.Option(help="For the others to read.")] = "",
    home: HomeOption = None,
) -> None:
    """Take updates out of a run that this machine owns, on every machine. Without --peer or --update: list whose there
    are."""
    from barnraise.exchange.handlers.verdict_handler import VERDICT_FOLDER
    from barnraise.exchange.ledger.ledger import Ledger
    from barnraise.spec import RunSpec
    from barnraise.training.join import (
        find_saved_run,
    )  # torch takes seconds to import: only where it is needed

    place = StateDir(home or StateDir.default_path())
    kept = find_saved_run(place, run)
    if kept is None:
        raise StateError(f"this machine has never worked on '{run}'")
    spec, folder = RunSpec.from_json(kept.spec), place.path / "runs" / kept.id
    with contextlib.closing(
        Ledger(folder, sweep=False)
    ) as ledger:  # a worker may be using it at the same time
        if not peer and not update:
            _list(ledger)
            return
        if place.identity.key != spec.owner:
            who = f"the machine {spec.owner[:8]}, which prepared its text; this one is {place.identity.key[:8]}"
            raise StateError(f"verdicts on '{run}' are signed by {who}")
        cuts = {author: after for author in _lives(ledger, peer, after)} if peer else {}
        made = build_verdict(
            ledger, kept.id, cuts, _singles(update or []), spec.verdict_horizon, reason
        )
    signed = place.identity.sign("verdict", made)
    ruling = SignedVerdict(body=signed.body, signatures={signed.key: signed.signature})
    write_atomically(
        folder / VERDICT_FOLDER / f"{digest(signed.body)}.json", ruling.model_dump_json().encode()
    )
    out.print(
        "Signed. This machine's worker hands it to the others: now if it runs, else when it is next started."
    )


def build_verdict(
    ledger: "Ledger",
    run: str,
    cuts: Mapping[str, int],
    singles: Mapping[str, Iterable[int]],
    horizon: int,
    reason: str = "",
) -> Verdict:
    """The verdict that cuts authors after a number and takes single updates out. Raises StateError with a sentence for
    what is not here, what nobody may have the payload of, and what is more than `horizon` rounds of everybody's old."""
    named = [
        (author, seq)
        for author, last in cuts.items()
        for seq in range(last + 1, ledger.head(author).seq + 1)
    ]
    named += [(author, seq) for author, seqs in singles.items() for seq in seqs]
    if not named:
        raise StateError("there is no such update in this machine's ledger: nothing would come out")
    oldest = horizon * sum(update.tokens for update in ledger.last_updates().values())
    tokens: dict[tuple[str, int], int] = {}
    for author, seq in named:
        who, update = f"update {seq} of {author[:8]}", ledger.update(author, seq)
        if update is None or seq > ledger.head(author).seq:
            raise StateError(f"{who} is not in this machine's ledger")
        if (age := ledger.tokens_since(author, seq)) > oldest:
            raise StateError(
                f"{who} is {age:,} tokens old, and verdicts reach back {oldest:,} ({horizon} rounds): go on from a "
                "checkpoint before it, as a new run"
            )
        if not all(ledger.blobs.has(part.digest) for part in update.fragments):
            raise StateError(
                f"{who} cannot be taken out: its bytes are not here any more, and may not be anywhere"
            )
        tokens[author, seq] = update.tokens
    updates = {
        author: {seq: tokens[author, seq] for seq in seqs} for author, seqs in singles.items()
    }
    return Verdict(
        run=run, after=dict(cuts), updates=updates, reason=reason[:100], issued=time.time()
    )


def _lives(ledger: "Ledger", peer: str, after: int) -> list[str]:
    found = (
        [author for author in ledger.vector() if author.startswith(peer)] if len(peer) >= 8 else []
    )
    if not found:
        raise StateError(
            f"no update of '{peer}' is in this machine's ledger; eight digits of a key are needed at least"
        )
    if len({author.partition(".")[0] for author in found}) > 1 or (after and len(found) > 1):
        raise StateError(
            f"'{peer}' may be {', '.join(f'{a[:8]}….{a[-16:]}' for a in found)}: name one as KEY.LIFE"
        )
    return found


def _singles(named: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in named:
        author, _, number = each.partition(":")
        if not number.isdecimal() or len(author) != 81:
            raise StateError(
                f"'{each}' is not KEY.LIFE:NUMBER, as `barnraise verdict RUN` lists them"
            )
        found.setdefault(author, []).append(int(number))
    return found


def _list(ledger: "Ledger") -> None:
    table = Table("whose", "updates", "tokens", "out already", box=None, pad_edge=False)
    for author, last in ledger.vector().items():
        gone = ledger.verdicts.singles.get(author, {})
        table.add_row(
            escape(author), str(last), f"{ledger.head(author).total:,}", ", ".join(map(str, gone))
        )
    out.print(table if ledger.vector() else "There are no updates yet.")
