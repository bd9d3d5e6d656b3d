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
from coordinator.eventlog.bulk_upsert import bulk_upsert
from coordinator.eventlog.models import Aggregate, PrivateData
from coordinator.eventlog.projection import canonical_json, write_pending_rows, write_rows
from coordinator.eventlog.writer import log_transaction

log = logging.getLogger("coordinator.eventlog")
MAX_BODY_CHARS = 100_000  # characters
MAX_EXPORTED = 500  # served at once


@dataclass(frozen=True)
class PrivateRecord:
    """One of them on its way to another mirror."""

    digest: str
    salt: str
    body: str


def store(subject: str, said: dict[str, Any]) -> str:
    """The digest by which an event may name this; within `writer.log_transaction`, before `record`. The same text as now has the
    same digest again."""
    body = canonical_json(said)
    if before := PrivateData.objects.filter(subject=subject, body=body).first():
        return before.digest
    salt = secrets.token_hex(16)
    made = PrivateData.objects.create(
        digest=digest(salt + body), subject=subject, salt=salt, body=body
    )
    return made.digest


def load(named: str | None, shape: type[Message]) -> dict[str, Any] | None:
    """None where it is not here (yet, or any more), or is not of this shape: another mirror wrote it."""
    return load_many([named], shape).get(named) if named else None


def load_many(named: Collection[str], shape: type[Message]) -> dict[str, dict[str, Any]]:
    """Many at once: those that are here, by digest."""
    found = {}
    for each in PrivateData.objects.filter(pk__in=named).exclude(body=""):
        try:
            found[each.pk] = shape.model_validate_json(each.body).model_dump()
        except ValidationError as error:
            log.error("particulars %s make no sense: %s", each.pk, error)
    return found


def missing_digests() -> list[str]:
    """Digests that states name, whose text has not come yet."""
    return list(PrivateData.objects.filter(body="").values_list("pk", flat=True))


def export(digests: Collection[str]) -> list[PrivateRecord]:
    """Of these, what is here."""
    found = (
        PrivateData.objects.filter(pk__in=list(digests)[:MAX_EXPORTED])
        .exclude(body="")
        .order_by("pk")
    )
    return [PrivateRecord(each.digest, each.salt, each.body) for each in found]


def ingest(come: Sequence[PrivateRecord], later: bool = False) -> int:
    """What another mirror sent. Only what is wanted and is what its digest says; how many that were. `later`: rows are
    written by the next `settle`."""
    fits = {
        each.digest: each
        for each in come
        if len(each.salt) == 32
        and 0 < len(each.body) <= MAX_BODY_CHARS
        and "\0" not in each.salt + each.body
        and digest(each.salt + each.body) == each.digest
    }
    with log_transaction():
        rows = list(PrivateData.objects.filter(pk__in=fits, body=""))
        for row in rows:
            row.salt, row.body = fits[row.digest].salt, fits[row.digest].body
        bulk_upsert(rows, update=["salt", "body"])
        concerned = Aggregate.objects.filter(pk__in={row.subject for row in rows})
        if later:
            concerned.update(stored=False)
        else:
            write_rows(list(concerned))
            write_pending_rows()
    return len(rows)
