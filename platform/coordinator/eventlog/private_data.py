"""What people may take back: names, addresses, drafts. Events name it by a salted digest; the text is in a row beside
the log, which goes once no state names it, and travels between mirrors by a way of its own, encrypted to each."""

import logging
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message
from coordinator.eventlog.bulk_upsert import put
from coordinator.eventlog.models import Particulars, Subject
from coordinator.eventlog.projection import canonical, write, write_waiting
from coordinator.eventlog.writer import change

log = logging.getLogger("coordinator.eventlog")
LONGEST = 100_000  # characters
MOST = 500  # served at once


@dataclass(frozen=True)
class Kept:
    """One of them on its way to another mirror."""

    digest: str
    salt: str
    body: str


def keep(subject: str, said: dict[str, Any]) -> str:
    """The digest by which an event may name this; within `log.change`, before `record`. The same text as now has the
    same digest again."""
    body = canonical(said)
    if before := Particulars.objects.filter(subject=subject, body=body).first():
        return before.digest
    salt = secrets.token_hex(16)
    made = Particulars.objects.create(
        digest=digest(salt + body), subject=subject, salt=salt, body=body
    )
    return made.digest


def look(named: str | None, shape: type[Message]) -> dict[str, Any] | None:
    """None where it is not here (yet, or any more), or is not of this shape: another mirror wrote it."""
    return looks([named], shape).get(named) if named else None


def looks(named: Collection[str], shape: type[Message]) -> dict[str, dict[str, Any]]:
    """Many at once: those that are here, by digest."""
    found = {}
    for each in Particulars.objects.filter(pk__in=named).exclude(body=""):
        try:
            found[each.pk] = shape.model_validate_json(each.body).model_dump()
        except ValidationError as error:
            log.error("particulars %s make no sense: %s", each.pk, error)
    return found


def wanted() -> list[str]:
    """Digests that states name, whose text has not come yet."""
    return list(Particulars.objects.filter(body="").values_list("pk", flat=True))


def serve(digests: Collection[str]) -> list[Kept]:
    """Of these, what is here."""
    found = Particulars.objects.filter(pk__in=list(digests)[:MOST]).exclude(body="").order_by("pk")
    return [Kept(each.digest, each.salt, each.body) for each in found]


def take(come: Sequence[Kept], later: bool = False) -> int:
    """What another mirror sent. Only what is wanted and is what its digest says; how many that were. `later`: rows are
    written by the next `settle`."""
    fits = {
        each.digest: each
        for each in come
        if len(each.salt) == 32
        and 0 < len(each.body) <= LONGEST
        and "\0" not in each.salt + each.body
        and digest(each.salt + each.body) == each.digest
    }
    with change():
        rows = list(Particulars.objects.filter(pk__in=fits, body=""))
        for row in rows:
            row.salt, row.body = fits[row.digest].salt, fits[row.digest].body
        put(rows, update=["salt", "body"])
        concerned = Subject.objects.filter(pk__in={row.subject for row in rows})
        if later:
            concerned.update(stored=False)
        else:
            write(list(concerned))
            write_waiting()
    return len(rows)
