"""Store what people may take back: names, addresses, drafts.

Events name it by a salted digest. The text lies in a row outside the log, which is deleted as soon
as no state names it, and travels between mirrors separately, encrypted for each receiver.
"""

import logging
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message
from coordinator.eventlog.models import Aggregate, PrivateData
from coordinator.eventlog.projection import canonical_json, write_pending_rows, write_rows
from coordinator.eventlog.writer import log_transaction
from coordinator.lib.bulk_upsert import bulk_upsert

log = logging.getLogger("coordinator.eventlog")
MAX_BODY_CHARS = 100_000
MAX_EXPORTED = 500  # records in one answer
SALT_CHARS = 32


@dataclass(frozen=True)
class PrivateRecord:
    """Hold one text with its salt and digest, on its way to another mirror."""

    digest: str
    salt: str
    body: str


def store(aggregate: str, content: dict[str, Any]) -> str:
    """Store a text and return the digest by which events may name it.

    Call it in a `log_transaction`, before `record`. An unchanged text keeps its digest.
    """
    body = canonical_json(content)
    stored = PrivateData.objects.filter(aggregate=aggregate, body=body).first()
    if stored:
        return stored.digest
    salt = secrets.token_hex(SALT_CHARS // 2)
    created = PrivateData.objects.create(
        digest=digest(salt + body), aggregate=aggregate, salt=salt, body=body
    )
    return created.digest


def load(digest_: str | None, shape: type[Message]) -> dict[str, Any] | None:
    """Return one text; None if it has not arrived, was deleted, or does not have this shape."""
    return load_many([digest_], shape).get(digest_) if digest_ else None


def load_many(digests: Collection[str], shape: type[Message]) -> dict[str, dict[str, Any]]:
    """Return those texts that are here and have this shape, by digest."""
    contents = {}
    for record in PrivateData.objects.filter(pk__in=digests).exclude(body=""):
        try:
            contents[record.pk] = shape.model_validate_json(record.body).model_dump()
        except ValidationError as error:  # another mirror wrote it
            log.error("private data %s is not a %s: %s", record.pk, shape.__name__, error)
    return contents


def missing_digests() -> list[str]:
    """Return the digests that states name and whose text has not arrived."""
    return list(PrivateData.objects.filter(body="").values_list("pk", flat=True))


def export(digests: Collection[str]) -> list[PrivateRecord]:
    """Return those of the first MAX_EXPORTED digests whose text is here."""
    rows = PrivateData.objects.filter(pk__in=list(digests)[:MAX_EXPORTED]).exclude(body="")
    return [PrivateRecord(row.digest, row.salt, row.body) for row in rows.order_by("pk")]


def ingest(records: Sequence[PrivateRecord], defer: bool = False) -> int:
    """Store those texts of another mirror that are missing here and match their digest.

    With `defer`, the next `ingest.project_pending` writes the rows that depend on them.

    Returns:
        How many were stored.
    """
    valid = {record.digest: record for record in records if _is_valid(record)}
    with log_transaction():
        rows = list(PrivateData.objects.filter(pk__in=valid, body=""))
        for row in rows:
            row.salt = valid[row.digest].salt
            row.body = valid[row.digest].body
        bulk_upsert(rows, update=["salt", "body"])
        dependents = Aggregate.objects.filter(pk__in={row.aggregate for row in rows})
        if defer:
            dependents.update(projected=False)
        else:
            write_rows(list(dependents))
            write_pending_rows()
    return len(rows)


def _is_valid(record: PrivateRecord) -> bool:
    """Return whether the text has an allowed form and matches its digest."""
    return (
        len(record.salt) == SALT_CHARS
        and 0 < len(record.body) <= MAX_BODY_CHARS
        and "\0" not in record.salt + record.body  # Postgres stores no NUL
        and digest(record.salt + record.body) == record.digest
    )
