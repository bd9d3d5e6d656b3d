"""Replicate verified addresses and second factors, so that a log-in works at every mirror.

Each mirror records them as the person confirmed them there, by signing in or by a change. A mirror
that has recorded none uses those of the mirror where the person joined; no mirror changes what the
person has confirmed at another.

allauth stores them in rows that it writes in many places. After each write the rows are compared
with the event log, and the difference is recorded. Secrets are private data, outside the log.
"""

from collections.abc import Callable, Iterator
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
from coordinator.eventlog import private_data, writer
from coordinator.eventlog.models import PrivateData
from coordinator.eventlog.projection import current_state
from coordinator.lib import site_identity

# Recovery codes alone make nobody enter a second factor.
STRONG_FACTORS = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
NO_CREDENTIALS: dict[str, Any] = {"addresses": None, "factors": {}, "used_codes": {}}
NOTHING_RECORDED: dict[str, Any] = {"addresses": None, "factors": None}
_is_recording: ContextVar[bool] = ContextVar("is_recording", default=True)


@contextmanager
def recording_suspended() -> Iterator[None]:
    """Record nothing within this context: rows are written because of an event."""
    before = _is_recording.set(False)
    try:
        yield
    finally:
        _is_recording.reset(before)


def connect_signals() -> None:
    """Record credentials whenever allauth writes or deletes their rows."""
    pre_save.connect(_add_factor_id, sender=Authenticator, dispatch_uid="access named")
    for model, record in ((EmailAddress, record_addresses), (Authenticator, record_factors)):
        for signal in (post_save, post_delete):
            signal.connect(
                _change_handler(record),
                sender=model,
                weak=False,
                dispatch_uid=f"access {model.__name__} {signal!r}",
            )


def _add_factor_id(sender: Any, instance: Authenticator, **kwargs: Any) -> None:
    """Give a factor an id of its own, because its row's number is only known to this site."""
    instance.data.setdefault("id", str(uuid7()))


def ensure_factor_id(row: Authenticator) -> None:
    """Give a factor an id if it was created before mirrors replicated factors."""
    if "id" not in row.data:
        _add_factor_id(Authenticator, row)
        Authenticator.objects.filter(pk=row.pk).update(data=row.data)


def _change_handler(record: Callable[[UUID, Any], None]) -> Callable[..., None]:
    def on_change(
        signal: Any, instance: Any, origin: Any = None, update_fields: Any = None, **kwargs: Any
    ) -> None:
        # The model that somebody deleted rows of; a deleted person takes their credentials along.
        deleted_model = origin.model if isinstance(origin, QuerySet) else type(origin)
        is_use_only = update_fields == frozenset({"last_used_at"})
        if _is_recording.get() and deleted_model is not User and not is_use_only:
            record(instance.user_id, instance if signal is post_delete else None)

    return on_change


def list_addresses(person: UUID) -> list[dict[str, Any]]:
    """List a person's email addresses as the log records them."""
    addresses = EmailAddress.objects.filter(user=person).order_by("email")
    return list(addresses.values("email", "verified", "primary"))


def record_addresses(person: UUID, deleted: EmailAddress | None = None) -> None:
    """Record all of a person's addresses, if they changed.

    While this site has not received the addresses that another mirror recorded, its rows are
    incomplete, and it records nothing.
    """
    with writer.log_transaction():
        state = _recorded_state(person)
        recorded = [state["addresses"]] if state["addresses"] else []
        if not _person_exists(person) or _find_missing(recorded):
            return
        addresses = list_addresses(person)
        if not recorded and not addresses:
            return
        content_digest = private_data.store(f"access:{person}", {"addresses": addresses})
        if content_digest != _own_record(person)["addresses"]:
            writer.record("access.set_addresses", person, {"content_digest": content_digest})


def record_factors(person: UUID, deleted: Authenticator | None = None) -> None:
    """Record new, renamed and deleted second factors, and recovery codes that were used.

    A factor without a row here does not count as deleted: this site may not have received it, or
    not understand it.
    """
    with writer.log_transaction():
        if not _person_exists(person):
            return
        state = _recorded_state(person)
        rows = {
            row.data["id"]: row
            for row in Authenticator.objects.filter(user=person)
            if "id" in row.data
        }
        own = _own_record(person)["factors"]
        if own is None and _find_missing([found for _, found in state["factors"].values()]):
            return  # what this site has not received must not be lost here
        if deleted and deleted.data.get("id") in {**state["factors"], **(own or {})}:
            writer.record("access.remove_factors", person, {"factors": [deleted.data["id"]]})
        for factor, row in sorted(rows.items()):
            content_digest = private_data.store(f"access:{person}", factor_payload(row))
            if (own or {}).get(factor, [None, None])[1] != content_digest:
                payload = {"factor": factor, "type": row.type, "content_digest": content_digest}
                writer.record("access.add_factor", person, payload)
            used = sorted(used_code_numbers(row) - {*state["used_codes"].get(factor, [])})
            if used:
                writer.record("access.use_codes", person, {"factor": factor, "codes": used})


def record_credentials(person: UUID) -> None:
    """Record at each log-in what this site has not recorded yet: the person confirms it."""
    if not _own_record(person)["addresses"]:
        record_addresses(person)
    record_factors(person)
    with writer.log_transaction():
        User.objects.get(pk=person).record_profile()


def factor_payload(row: Authenticator) -> dict[str, Any]:
    """Return a factor's private data."""
    content = {
        name: row.data[name] for name in ("secret", "seed", "credential") if name in row.data
    }
    if "name" in row.data:
        content["name"] = strip_unprintable(row.data["name"])[:100]
    return {"created": row.created_at.timestamp(), **content}


def used_code_numbers(row: Authenticator) -> set[int]:
    """Return the numbers of the recovery codes that were used."""
    mask = row.data.get("used_mask", 0)
    return {number for number in range(mask.bit_length()) if mask >> number & 1}


def missing_credentials(person: User) -> str:
    """Return what the event log names and this site has not received; "" for nothing.

    The person may not log in as long as something is missing.
    """
    state = _recorded_state(person.pk)
    if state["addresses"] and _find_missing([state["addresses"]]):
        return "Your addresses have"
    needs_factor = any(type_ in STRONG_FACTORS for type_, _ in state["factors"].values())
    factors = Authenticator.objects.filter(user=person, type__in=STRONG_FACTORS)
    if needs_factor and not factors.exists():
        return "Your second factor has"
    return ""


def _person_exists(person: UUID) -> bool:
    return User.objects.filter(pk=person, left=None).exists()


def state_used_here(person: object, state: dict[str, Any]) -> dict[str, Any]:
    """Return the addresses and factors that this site uses, and the codes that were used anywhere.

    What this site has not recorded comes from the mirror where the person joined.
    """
    home = (current_state(f"person:{person}") or {}).get("home", "")
    own = state["mirrors"].get(site_identity.identity().key, NOTHING_RECORDED)
    first = state["mirrors"].get(home, NOTHING_RECORDED)
    factors = first["factors"] if own["factors"] is None else own["factors"]
    factors = factors or {}
    return {
        "addresses": own["addresses"] or first["addresses"],
        "factors": factors,
        "used_codes": {
            name: codes for name, codes in state["used_codes"].items() if name in factors
        },
    }


def _recorded_state(person: UUID) -> dict[str, Any]:
    state = current_state(f"access:{person}")
    return NO_CREDENTIALS if state is None else state_used_here(person, state)


def _own_record(person: UUID) -> dict[str, Any]:
    """Return what this site has recorded of the person's addresses and factors."""
    state = current_state(f"access:{person}") or {"mirrors": {}}
    return state["mirrors"].get(site_identity.identity().key, NOTHING_RECORDED)


def _find_missing(digests: list[str]) -> set[str]:
    received = PrivateData.objects.filter(pk__in=digests).exclude(body="")
    return {*digests} - {*received.values_list("pk", flat=True)}
