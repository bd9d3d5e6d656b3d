"""The aggregate type "access", by person: verified addresses and second factors.

The events say that they exist. The addresses and secrets themselves are private data: encrypted
between mirrors, and deleted with the person or the factor.
"""

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
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State, require_row

TOTP, CODES, PASSKEY = (
    Authenticator.Type.TOTP,
    Authenticator.Type.RECOVERY_CODES,
    Authenticator.Type.WEBAUTHN,
)
SECRET_FIELDS = {
    TOTP.value: ["secret"],
    CODES.value: ["seed"],
    PASSKEY.value: ["name", "credential"],
}
SINGLE_TYPES = (TOTP.value, CODES.value)  # a person has at most one factor of these types


class EmailAddressContent(Message):
    """One address, within private data."""

    email: str = Field(max_length=254, pattern=r"^[^@\s\x00-\x1fA-Z]+@[^@\s\x00-\x1fA-Z]+$")
    verified: bool
    primary: bool


class AddressListContent(Message):
    """Private data: all of a person's addresses."""

    addresses: list[EmailAddressContent] = Field(max_length=50)


class FactorContent(Message):
    """Private data of one factor; its type decides which fields are set."""

    created: UnixTime
    secret: str = Field("", pattern=r"^[A-Z2-7]{0,64}=*$")
    seed: str = Field("", pattern=r"^[0-9a-f]{0,128}$")
    name: PlainText = Field("", max_length=100)
    credential: dict[str, Any] = Field({}, max_length=20)


class AddressesChanged(Message):
    """The person has these addresses."""

    content_digest: Digest


class FactorAdded(Message):
    """The person added or renamed a factor."""

    factor: Id
    type: Literal["totp", "recovery_codes", "webauthn"]
    content_digest: Digest


class FactorsRemoved(Message):
    """The person removed factors."""

    factors: list[Id] = Field(max_length=100)


class RecoveryCodesUsed(Message):
    """The person used recovery codes."""

    factor: Id
    codes: list[int] = Field(max_length=64)


class CredentialsErased(Message):
    """The person deleted their account."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Merge the events of a person, for each mirror that recorded any.

    A mirror's last event of addresses counts. A factor that was removed at a mirror is removed
    there for good. Of two apps, and of two sheets of recovery codes, the last counts. A code that
    was used at any mirror is used at all. Nothing is left of a person who deleted their account.
    """
    if not facts or any(fact.action == "delete" for fact in facts):
        return None
    used: dict[str, set[int]] = {}
    for fact in facts:
        if fact.action == "use_codes":
            used.setdefault(fact.payload.factor, set()).update(fact.payload.codes)
    mirrors = dict.fromkeys(fact.mirror for fact in facts if fact.action != "use_codes")
    return {
        "mirrors": {mirror: _fold_mirror(facts, mirror) for mirror in mirrors},
        "used_codes": {factor: sorted(codes) for factor, codes in used.items()},
    }


def _fold_mirror(facts: Sequence[Fact], mirror: str) -> State:
    own = [fact for fact in facts if fact.mirror == mirror]
    removed = {
        factor for fact in own if fact.action == "remove_factors" for factor in fact.payload.factors
    }
    addresses = None
    factors: dict[str, list[str]] = {}
    has_factors = any(fact.action in ("add_factor", "remove_factors") for fact in own)
    for fact in own:
        if fact.action == "set_addresses":
            addresses = fact.payload.content_digest
        elif fact.action == "add_factor" and fact.payload.factor not in removed:
            factors.pop(fact.payload.factor, None)
            factors[fact.payload.factor] = [fact.payload.type, fact.payload.content_digest]
    for kind in SINGLE_TYPES:
        for earlier in [name for name, (type_, _) in factors.items() if type_ == kind][:-1]:
            del factors[earlier]
    return {"addresses": addresses, "factors": factors if has_factors else None}


def private_digests(state: State) -> list[str]:
    """Name the private data of addresses and factors, of every mirror."""
    return sorted(
        {
            content_digest
            for own in state["mirrors"].values()
            for content_digest in [
                own["addresses"],
                *(of_factor for _, of_factor in (own["factors"] or {}).values()),
            ]
            if content_digest
        }
    )


def store(person_id: str, state: State | None) -> None:
    """Write addresses and factors.

    Private data that this site has not received leaves the rows as they are; factors that are not
    in the state are deleted at once.
    """
    if state is not None:
        require_row(User.objects.filter(pk=person_id), f"person:{person_id}")
    with credential_sync.recording_suspended():
        if state is None or User.objects.filter(pk=person_id, left__isnull=False).exists():
            EmailAddress.objects.filter(user=person_id).delete()
            Authenticator.objects.filter(user=person_id).delete()
            return
        used = credential_sync.state_used_here(person_id, state)
        if (lists := private_data.load(used["addresses"], AddressListContent)) is not None:
            _store_addresses(person_id, lists["addresses"])
        _store_factors(person_id, used)


def _store_addresses(person_id: str, wanted: list[dict]) -> None:
    """Write addresses, except those that somebody else has verified here."""
    emails = [address["email"] for address in wanted]
    others = EmailAddress.objects.filter(email__in=emails, verified=True).exclude(user=person_id)
    taken = set(others.values_list("email", flat=True))
    rows = [
        EmailAddress(user_id=person_id, **address)
        for address in wanted
        if address["email"] not in taken
    ]
    own_addresses = EmailAddress.objects.filter(user=person_id)
    stored = {address.email: (address.verified, address.primary) for address in own_addresses}
    if stored != {row.email: (row.verified, row.primary) for row in rows}:
        own_addresses.delete()
        EmailAddress.objects.bulk_create(rows)


def _store_factors(person_id: str, state: State) -> None:
    rows = {row.data.get("id"): row for row in Authenticator.objects.filter(user=person_id)}
    stale = [row.pk for name, row in rows.items() if name not in state["factors"]]
    if stale:
        Authenticator.objects.filter(pk__in=stale).delete()
    for name, (kind, content_digest) in state["factors"].items():
        secret = private_data.load(content_digest, FactorContent)
        if secret is None or not _is_readable(kind, secret):
            continue
        row, created = rows.get(name), datetime.fromtimestamp(secret.pop("created"), UTC)
        data = {
            **(row.data if row else {}),
            "id": name,
            **{field: secret[field] for field in SECRET_FIELDS[kind]},
        }
        if kind == CODES:
            data["used_mask"] = sum(
                1 << code for code in state["used_codes"].get(name, []) if 0 <= code < 64
            )
        if row is None:
            Authenticator.objects.bulk_create(
                [Authenticator(user_id=person_id, type=kind, data=data, created_at=created)]
            )
        elif row.data != data:
            Authenticator.objects.filter(pk=row.pk).update(data=data)


def store_batch(states: dict[str, State]) -> set[str]:
    """Write, all at once, people who have a row but no addresses or factors yet.

    Only people without a second factor are written, and only if nobody else has one of their
    addresses.
    """
    states = {
        person_id: credential_sync.state_used_here(person_id, state)
        for person_id, state in states.items()
    }
    lists = private_data.load_many(
        [state["addresses"] for state in states.values() if state["addresses"]], AddressListContent
    )
    plain = {
        person_id: lists[state["addresses"]]["addresses"]
        for person_id, state in states.items()
        if state["addresses"] in lists and not state["factors"]
    }
    people = set(
        map(str, User.objects.filter(pk__in=plain, left=None).values_list("pk", flat=True))
    )
    for rows in (EmailAddress, Authenticator):
        people -= set(
            map(str, rows.objects.filter(user__in=people).values_list("user_id", flat=True))
        )
    emails = Counter(address["email"] for addresses in plain.values() for address in addresses)
    taken = {*EmailAddress.objects.filter(email__in=emails).values_list("email", flat=True)}
    taken |= {email for email, many in emails.items() if many > 1}
    done = {
        person_id
        for person_id in people
        if not taken.intersection(address["email"] for address in plain[person_id])
    }
    EmailAddress.objects.bulk_create(
        [
            EmailAddress(user_id=person_id, **address)
            for person_id in done
            for address in plain[person_id]
        ]
    )
    return done


def _is_readable(kind: str, secret: dict) -> bool:
    """Return whether the pages of two-factor sign-in can read what another mirror recorded."""
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
    """Describe the rows of a site that is older than its log."""
    for person in User.objects.filter(left=None):
        if addresses := credential_sync.list_addresses(person.pk):
            content_digest = _store_private(person, {"addresses": addresses})
            yield "access.set_addresses", person.pk, {"content_digest": content_digest}
        for row in Authenticator.objects.filter(user=person).order_by("pk"):
            credential_sync.ensure_factor_id(row)
            factor = row.data["id"]
            content_digest = _store_private(person, credential_sync.factor_payload(row))
            payload = {"factor": factor, "type": row.type, "content_digest": content_digest}
            yield "access.add_factor", person.pk, payload
            if used := sorted(credential_sync.used_code_numbers(row)):
                yield "access.use_codes", person.pk, {"factor": factor, "codes": used}


def _store_private(person: User, content: dict[str, Any]) -> str:
    return private_data.store(f"access:{person.pk}", content)


PAYLOAD_TYPES = {
    "set_addresses": AddressesChanged,
    "add_factor": FactorAdded,
    "remove_factors": FactorsRemoved,
    "use_codes": RecoveryCodesUsed,
    "delete": CredentialsErased,
}
AGGREGATE_TYPE = AggregateType(
    "access",
    PAYLOAD_TYPES,
    fold,
    store,
    private_digests=private_digests,
    existing_events=existing_events,
    store_batch=store_batch,
)
