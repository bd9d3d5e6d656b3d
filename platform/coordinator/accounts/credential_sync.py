"""What opens an account besides its password: verified addresses and second factors, the same at every mirror.

allauth keeps the rows and writes them in many places. After each of these the rows are compared with what the log says,
and the difference is recorded; secrets go into particulars."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from django.db.models import QuerySet
from django.db.models.signals import post_delete, post_save, pre_save
from uuid6 import uuid7

from coordinator.accounts.machines import strip_unprintable
from coordinator.accounts.models import User
from coordinator.eventlog import private_data
from coordinator.eventlog import writer as mirrors
from coordinator.eventlog.models import PrivateData
from coordinator.eventlog.projection import current_state

STRONG_FACTORS = (
    Authenticator.Type.TOTP,
    Authenticator.Type.WEBAUTHN,
)  # recovery codes alone ask nobody for anything
NO_CREDENTIALS: dict[str, Any] = {"addresses": None, "factors": {}, "spent": {}}
_told: ContextVar[bool] = ContextVar("told", default=True)


@contextmanager
def recording_suspended() -> Iterator[None]:
    """Rows change because the log says so."""
    before = _told.set(False)
    try:
        yield
    finally:
        _told.reset(before)


def connect_signals() -> None:
    pre_save.connect(_named, sender=Authenticator, dispatch_uid="access named")
    for model, tell in ((EmailAddress, record_addresses), (Authenticator, record_factors)):
        for signal in (post_save, post_delete):
            signal.connect(
                _teller(tell),
                sender=model,
                weak=False,
                dispatch_uid=f"access {model.__name__} {signal!r}",
            )


def _named(sender: Any, instance: Authenticator, **rest: Any) -> None:
    """A factor goes by an id of its own: its row's number is this site's alone."""
    instance.data.setdefault("id", str(uuid7()))


def ensure_factor_id(row: Authenticator) -> None:
    """One from before mirrors shared them gets its id."""
    if "id" not in row.data:
        _named(Authenticator, row)
        Authenticator.objects.filter(pk=row.pk).update(data=row.data)


def _teller(tell: Any) -> Any:
    def changed(
        signal: Any, instance: Any, origin: Any = None, update_fields: Any = None, **rest: Any
    ) -> None:
        whole = (
            origin.model if isinstance(origin, QuerySet) else type(origin)
        )  # what somebody deleted
        if _told.get() and whole is not User and update_fields != frozenset({"last_used_at"}):
            tell(instance.user_id, instance if signal is post_delete else None)

    return changed


def record_addresses(person: UUID, gone: EmailAddress | None = None) -> None:
    """All of a person's addresses as they are now, where that is news. While another mirror's word on them has not
    come, what is here is less than they have, and says nothing."""
    with mirrors.log_transaction():
        known = _known(person)
        if not _exists(person) or _missing([known["addresses"]] if known["addresses"] else []):
            return
        rows = (
            EmailAddress.objects.filter(user=person)
            .order_by("email")
            .values("email", "verified", "primary")
        )
        if not known["addresses"] and not rows:
            return
        about = private_data.store(f"access:{person}", {"addresses": list(rows)})
        if about != known["addresses"]:
            mirrors.record("access.addresses", person, {"about": about})


def record_factors(person: UUID, gone: Authenticator | None = None) -> None:
    """Second factors that came or have another name, the one that went, and recovery codes that were used. One that has
    merely no row here was not removed: it may not have come, or make no sense to this version."""
    with mirrors.log_transaction():
        if not _exists(person):
            return
        known = _known(person)
        here = {
            row.data["id"]: row
            for row in Authenticator.objects.filter(user=person)
            if "id" in row.data
        }
        if gone and gone.data.get("id") in known["factors"]:
            mirrors.record("access.remove", person, {"factors": [gone.data["id"]]})
        for name, row in sorted(here.items()):
            about = private_data.store(f"access:{person}", factor_payload(row))
            if known["factors"].get(name, [None, None])[1] != about:
                mirrors.record(
                    "access.add", person, {"factor": name, "type": row.type, "about": about}
                )
            if used := sorted(used_code_numbers(row) - {*known["spent"].get(name, [])}):
                mirrors.record("access.spend", person, {"factor": name, "codes": used})


def record_credentials(person: UUID) -> None:
    """At each log-in, in case this site died between a row and its event."""
    if not _known(person)["addresses"]:
        record_addresses(person)
    record_factors(person)


def factor_payload(row: Authenticator) -> dict[str, Any]:
    """A factor's particulars."""
    about = {name: row.data[name] for name in ("secret", "seed", "credential") if name in row.data}
    called = {"name": strip_unprintable(row.data["name"])[:100]} if "name" in row.data else {}
    return {"created": row.created_at.timestamp(), **about, **called}


def used_code_numbers(row: Authenticator) -> set[int]:
    """Numbers of the recovery codes that were used."""
    mask = row.data.get("used_mask", 0)
    return {number for number in range(mask.bit_length()) if mask >> number & 1}


def missing_credentials(person: User) -> str:
    """What the log says they have and has not come here: while that is so they are not let in. "" for nothing."""
    known = current_state(f"access:{person.pk}")
    if known is None:
        return ""
    if known["addresses"] and _missing([known["addresses"]]):
        return "Your addresses have"
    asked = any(kind in STRONG_FACTORS for kind, _ in known["factors"].values())
    if asked and not Authenticator.objects.filter(user=person, type__in=STRONG_FACTORS).exists():
        return "Your second factor has"
    return ""


def _exists(person: UUID) -> bool:
    return User.objects.filter(pk=person, left=None).exists()


def _known(person: UUID) -> dict[str, Any]:
    return current_state(f"access:{person}") or NO_CREDENTIALS


def _missing(digests: list[str]) -> set[str]:
    return {*digests} - {
        *PrivateData.objects.filter(pk__in=digests).exclude(body="").values_list("pk", flat=True)
    }
