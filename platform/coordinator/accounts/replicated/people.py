"""The aggregate type "person": that the person exists, rights, bans, and the account's deletion.

Name, address and password hash are private data, which is deleted with the account. The reason of a
ban stays at the mirror where it was decided.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal
from uuid import UUID

from django.contrib.auth.hashers import make_password
from django.db.models.functions import Lower
from pydantic import AwareDatetime, Field

from barnraise.protocol.types import Digest, Id, Message, PlainText
from coordinator.accounts import deletion
from coordinator.accounts.models import User
from coordinator.eventlog import private_data
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State
from coordinator.lib.bulk_upsert import bulk_upsert

RIGHTS = ("organiser", "is_staff")


class ProfileContent(Message):
    """Private data: name, address and password hash."""

    name: PlainText = Field(max_length=60)
    email: str = Field(max_length=254, pattern=r"^[^@\s\x00-\x1f]+@[^@\s\x00-\x1f]+$")
    password: str = Field(max_length=128, pattern=r"^[\x21-\x7e]*$")


class ProfileChanged(Message):
    """The person has another name, address or password; `about` is the private data's digest."""

    about: Digest


class PersonJoined(ProfileChanged):
    """The person created an account."""

    joined: AwareDatetime
    organiser: bool = False
    is_staff: bool = False


class RightChanged(Message):
    """The staff gave or withdrew a right."""

    right: Literal["organiser", "is_staff"]
    given: bool


class PersonBannedOrLeft(Message):
    """The staff banned the person, or the account was deleted."""

    at: AwareDatetime


class PersonUnbanned(Message):
    """The staff lifted bans; `lifts` are ids of events "person.ban"."""

    lifts: list[Id] = Field(max_length=1000)


def fold(facts: Sequence[Fact]) -> State | None:
    """Merge the events of a person.

    Of a right the last event by (hlc, id) counts, because its author knew the earlier decision. A
    ban counts until an unban names it: a ban that was decided elsewhere at the same time was
    unknown, and to keep somebody out too long is easier to repair than to let them in. A deleted
    account is final and has no rights.
    """
    joins = [fact.payload for fact in facts if fact.action == "join"]
    if not joins:
        return None
    rights = {right: getattr(joins[0], right) for right in RIGHTS}
    rights |= {fact.payload.right: fact.payload.given for fact in facts if fact.action == "grant"}
    lifted = {ban for fact in facts if fact.action == "unban" for ban in fact.payload.lifts}
    bans = [fact for fact in facts if fact.action == "ban" and str(fact.id) not in lifted]
    left = next((fact.payload.at.isoformat() for fact in facts if fact.action == "leave"), None)
    about = [fact.payload.about for fact in facts if fact.action == "about"] or [joins[0].about]
    return {
        "about": None if left else about[-1],
        "joined": joins[0].joined.isoformat(),
        **(dict.fromkeys(RIGHTS, False) if left else rights),
        "bans": [str(ban.id) for ban in bans],
        "banned": bans[0].payload.at.isoformat() if bans else None,
        "left": left,
    }


def store(person_id: str, state: State | None) -> None:
    """Write the person's row.

    Until the private data arrives the row has neither name nor address, and nobody can log in to
    it. An address that somebody else has here stays theirs. A person without an event is
    deactivated, not deleted: others' rows refer to the row.
    """
    people = User.objects.filter(pk=person_id)
    if state is None:
        people.update(is_active=False)
        return
    left, fields = state["left"], _fields(state, private_data.load(state["about"], ProfileContent))
    if (
        "email" in fields
        and User.objects.filter(email__iexact=fields["email"]).exclude(pk=person_id).exists()
    ):
        del fields["email"]
    person = people.first()
    if person is None:
        without_data = {
            "email": f"{UUID(person_id).hex}@elsewhere.invalid",
            "password": make_password(None),
        }
        erased = (
            {
                "left": datetime.fromisoformat(left),
                "email": deletion.placeholder_address(UUID(person_id)),
            }
            if left
            else {}
        )
        User.objects.bulk_create([User(pk=person_id, **{**without_data, **erased, **fields})])
        return
    people.update(**fields)
    if left and person.left is None:
        deletion.erase_personal_data(person, datetime.fromisoformat(left))


def _fields(state: State, about: dict | None) -> dict:
    banned = state["banned"]
    return {
        "date_joined": datetime.fromisoformat(state["joined"]),
        "organiser": state["organiser"],
        "is_staff": state["is_staff"],
        "banned": banned and datetime.fromisoformat(banned),
        "is_active": not banned and not state["left"],
    } | (about or {})


def store_batch(states: dict[str, State]) -> set[str]:
    """Write, all at once, new people whose address nobody else has."""
    abouts = private_data.load_many(
        [state["about"] for state in states.values() if state["about"]], ProfileContent
    )
    known = set(map(str, User.objects.filter(pk__in=states).values_list("pk", flat=True)))
    wanted = [about["email"].lower() for about in abouts.values()]
    counts = Counter(wanted)
    taken = {
        *User.objects.annotate(l=Lower("email")).filter(l__in=wanted).values_list("l", flat=True)
    }
    rows = {}
    for person_id, state in states.items():
        about = abouts.get(state["about"] or "")
        if (
            person_id in known
            or about is None
            or (email := about["email"].lower()) in taken
            or counts[email] > 1
        ):
            continue
        rows[person_id] = User(pk=person_id, **_fields(state, about))
    bulk_upsert(list(rows.values()))
    return set(rows)


def existing_events() -> Iterable[EventDraft]:
    """Describe the rows of a site that is older than its log."""
    for person in User.objects.all().iterator():
        yield "person.join", str(person.pk), person.event_payload()
        if person.banned:
            yield "person.ban", str(person.pk), {"at": person.banned}
        if person.left:
            yield "person.leave", str(person.pk), {"at": person.left}


def private_digests(state: State) -> list[str]:
    """Name the private data of the profile."""
    return [state["about"]] if state["about"] else []


AGGREGATE_TYPE = AggregateType(
    "person",
    {
        "join": PersonJoined,
        "about": ProfileChanged,
        "grant": RightChanged,
        "ban": PersonBannedOrLeft,
        "unban": PersonUnbanned,
        "leave": PersonBannedOrLeft,
    },
    fold,
    store,
    private_digests=private_digests,
    existing_events=existing_events,
    store_batch=store_batch,
)
