"""The kind "access", by person: that there are verified addresses and second factors. Which ones, and their secrets, is
in particulars: sealed between mirrors, and gone with the person or the factor."""

from base64 import b32decode
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.mfa.webauthn.internal.auth import parse_registration_response
from django.core.exceptions import ValidationError
from pydantic import Field

from barnraise.protocol.types import Digest, Id, Message, PlainText, UnixTime
from coordinator.accounts import credential_sync
from coordinator.accounts.models import User
from coordinator.eventlog import private_data
from coordinator.eventlog.registry import (
    AggregateType,
    DependencyMissingError,
    EventDraft,
    Fact,
    State,
)

TOTP, CODES, PASSKEY = (
    Authenticator.Type.TOTP,
    Authenticator.Type.RECOVERY_CODES,
    Authenticator.Type.WEBAUTHN,
)
FIELDS = {TOTP.value: ["secret"], CODES.value: ["seed"], PASSKEY.value: ["name", "credential"]}
ONE = (TOTP.value, CODES.value)  # nobody has two of these


class EmailAddressContent(Message):
    email: str = Field(max_length=254, pattern=r"^[^@\s\x00-\x1fA-Z]+@[^@\s\x00-\x1fA-Z]+$")
    verified: bool
    primary: bool


class AddressListContent(Message):
    """Particulars: all of a person's addresses."""

    addresses: list[EmailAddressContent] = Field(max_length=50)


class FactorContent(Message):
    """Particulars of one factor; which fields depends on its type."""

    created: UnixTime
    secret: str = Field("", pattern=r"^[A-Z2-7]{0,64}=*$")
    seed: str = Field("", pattern=r"^[0-9a-f]{0,128}$")
    name: PlainText = Field("", max_length=100)
    credential: dict[str, Any] = Field({}, max_length=20)


class AddressesChanged(Message):
    about: Digest


class FactorAdded(Message):
    factor: Id
    type: Literal["totp", "recovery_codes", "webauthn"]
    about: Digest


class FactorsRemoved(Message):
    factors: list[Id] = Field(max_length=100)


class RecoveryCodesUsed(Message):
    factor: Id
    codes: list[int] = Field(max_length=64)


class CredentialsErased(Message):
    pass


def fold(facts: Sequence[Fact]) -> State | None:
    """Of addresses the last word counts. A factor that was removed anywhere is removed for good, whoever added or named
    it at the same time; of two apps, and of two sheets of recovery codes, the last. A code that was used anywhere is
    used. Whoever leaves leaves nothing."""
    if not facts or any(fact.action == "forget" for fact in facts):
        return None
    removed = {
        factor for fact in facts if fact.action == "remove" for factor in fact.payload.factors
    }
    addresses, factors, spent = None, {}, {}
    for fact in facts:
        if fact.action == "addresses":
            addresses = fact.payload.about
        elif fact.action == "add" and fact.payload.factor not in removed:
            factors.pop(fact.payload.factor, None)
            factors[fact.payload.factor] = [fact.payload.type, fact.payload.about]
        elif fact.action == "spend":
            spent.setdefault(fact.payload.factor, set()).update(fact.payload.codes)
    for kind in ONE:
        for earlier in [name for name, (type, _) in factors.items() if type == kind][:-1]:
            del factors[earlier]
    used = {name: sorted(codes) for name, codes in spent.items() if name in factors}
    return {"addresses": addresses, "factors": factors, "spent": used}


def private_digests(state: State) -> list[str]:
    return [
        *([state["addresses"]] if state["addresses"] else []),
        *(about for _, about in state["factors"].values()),
    ]


def store(which: str, state: State | None) -> None:
    """What has not come yet leaves the rows as they are; a factor that the log names no more goes at once."""
    if state is not None and not User.objects.filter(pk=which).exists():
        raise DependencyMissingError(f"person:{which}")
    with credential_sync.recording_suspended():
        if state is None or User.objects.filter(pk=which, left__isnull=False).exists():
            EmailAddress.objects.filter(user=which).delete()
            Authenticator.objects.filter(user=which).delete()
            return
        if (lists := private_data.load(state["addresses"], AddressListContent)) is not None:
            _store_addresses(which, lists["addresses"])
        _store_factors(which, state)


def _store_addresses(which: str, wanted: list[dict]) -> None:
    """An address that somebody else has verified here stays theirs."""
    emails = [each["email"] for each in wanted]
    others = EmailAddress.objects.filter(email__in=emails, verified=True).exclude(user=which)
    taken = set(others.values_list("email", flat=True))
    rows = [EmailAddress(user_id=which, **each) for each in wanted if each["email"] not in taken]
    mine = EmailAddress.objects.filter(user=which)
    known = {each.email: (each.verified, each.primary) for each in mine}
    if known != {row.email: (row.verified, row.primary) for row in rows}:
        mine.delete()
        EmailAddress.objects.bulk_create(rows)


def _store_factors(which: str, state: State) -> None:
    rows = {row.data.get("id"): row for row in Authenticator.objects.filter(user=which)}
    stale = [row.pk for name, row in rows.items() if name not in state["factors"]]
    if stale:
        Authenticator.objects.filter(pk__in=stale).delete()
    for name, (kind, about) in state["factors"].items():
        secret = private_data.load(about, FactorContent)
        if secret is None or not _sound(kind, secret):
            continue
        row, created = rows.get(name), datetime.fromtimestamp(secret.pop("created"), UTC)
        data = {
            **(row.data if row else {}),
            "id": name,
            **{field: secret[field] for field in FIELDS[kind]},
        }
        if kind == CODES:
            data["used_mask"] = sum(
                1 << code for code in state["spent"].get(name, []) if 0 <= code < 64
            )
        if row is None:
            Authenticator.objects.bulk_create(
                [Authenticator(user_id=which, type=kind, data=data, created_at=created)]
            )
        elif row.data != data:
            Authenticator.objects.filter(pk=row.pk).update(data=data)


def store_batch(states: dict[str, State]) -> set[str]:
    """Of people who are here and have nothing yet: those with addresses that nobody else has, and no second factor."""
    lists = private_data.load_many(
        [state["addresses"] for state in states.values() if state["addresses"]], AddressListContent
    )
    plain = {which: lists[state["addresses"]]["addresses"] for which, state in states.items()
             if state["addresses"] in lists and not state["factors"]}  # fmt: skip
    people = set(
        map(str, User.objects.filter(pk__in=plain, left=None).values_list("pk", flat=True))
    )
    for rows in (EmailAddress, Authenticator):
        people -= set(
            map(str, rows.objects.filter(user__in=people).values_list("user_id", flat=True))
        )
    emails = Counter(each["email"] for said in plain.values() for each in said)
    taken = {*EmailAddress.objects.filter(email__in=emails).values_list("email", flat=True)}
    taken |= {email for email, many in emails.items() if many > 1}
    done = {
        which for which in people if not taken.intersection(each["email"] for each in plain[which])
    }
    EmailAddress.objects.bulk_create(
        [EmailAddress(user_id=which, **each) for which in done for each in plain[which]]
    )
    return done


def _sound(kind: str, secret: dict) -> bool:
    """Another mirror wrote it: what the pages of two-factor sign-in could not read is not taken over."""
    try:
        if kind == TOTP:
            return len(b32decode(secret["secret"])) > 0
        if kind == CODES:
            return bool(secret["seed"])
        return (
            parse_registration_response(secret["credential"]).response.attestation_object.auth_data
            is not None
        )
    except (ValidationError, ValueError, KeyError, AttributeError, TypeError):
        return False


def existing_events() -> Iterable[EventDraft]:
    for person in User.objects.filter(left=None):
        rows = (
            EmailAddress.objects.filter(user=person)
            .order_by("email")
            .values("email", "verified", "primary")
        )
        if rows:
            yield "access.addresses", person.pk, {"about": _keep(person, {"addresses": list(rows)})}
        for row in Authenticator.objects.filter(user=person).order_by("pk"):
            credential_sync.ensure_factor_id(row)
            factor, about = row.data["id"], _keep(person, credential_sync.factor_payload(row))
            yield "access.add", person.pk, {"factor": factor, "type": row.type, "about": about}
            if used := sorted(credential_sync.used_code_numbers(row)):
                yield "access.spend", person.pk, {"factor": factor, "codes": used}


def _keep(person: User, said: dict) -> str:
    return private_data.store(f"access:{person.pk}", said)


shapes = {
    "addresses": AddressesChanged,
    "add": FactorAdded,
    "remove": FactorsRemoved,
    "spend": RecoveryCodesUsed,
    "forget": CredentialsErased,
}
AGGREGATE_TYPE = AggregateType(
    "access",
    shapes,
    fold,
    store,
    private_digests=private_digests,
    existing_events=existing_events,
    store_batch=store_batch,
)
