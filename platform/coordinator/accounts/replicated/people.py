"""The kind "person": that there is somebody, what the staff granted, bans, and that they left. Who it is (name, address
and the password's hash) is in particulars, which go with them; why they were banned stays where that was decided."""

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
    """Particulars."""

    name: PlainText = Field(max_length=60)
    email: str = Field(max_length=254, pattern=r"^[^@\s\x00-\x1f]+@[^@\s\x00-\x1f]+$")
    password: str = Field(max_length=128, pattern=r"^[\x21-\x7e]*$")


class ProfileChanged(Message):
    """`about`: the digest of their name, address and password's hash."""

    about: Digest


class PersonJoined(ProfileChanged):
    joined: AwareDatetime
    organiser: bool = False
    is_staff: bool = False


class RightChanged(Message):
    right: Literal["organiser", "is_staff"]
    given: bool


class PersonBannedOrLeft(Message):
    at: AwareDatetime


class PersonUnbanned(Message):
    lifts: list[Id] = Field(max_length=1000)  # ids of events "person.ban"


def fold(facts: Sequence[Fact]) -> State | None:
    """Of a right the last word counts, by (hlc, id): whoever decides knows what was decided before. A ban counts until
    an unban *names* it: whoever lifted one ban did not know of another that was given at the same time elsewhere, and
    to keep somebody out too long is mended sooner than to let them in. Leaving is for good, and takes every right."""
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


def store(which: str, state: State | None) -> None:
    """A person from elsewhere has a row without a name or an address, which nobody logs in to, until those come by
    their own way. An address that somebody else has here stays theirs. Whom no event vouches for any more is kept out,
    not erased: what others did hangs on the row."""
    found = User.objects.filter(pk=which)
    if state is None:
        found.update(is_active=False)
        return
    left, fields = state["left"], _fields(state, private_data.load(state["about"], ProfileContent))
    if (
        "email" in fields
        and User.objects.filter(email__iexact=fields["email"]).exclude(pk=which).exists()
    ):
        del fields["email"]
    person = found.first()
    if person is None:
        nowhere = {"email": f"{UUID(which).hex}@elsewhere.invalid", "password": make_password(None)}
        gone = (
            {
                "left": datetime.fromisoformat(left),
                "email": deletion.placeholder_address(UUID(which)),
            }
            if left
            else {}
        )
        User.objects.bulk_create([User(pk=which, **{**nowhere, **gone, **fields})])
        return
    found.update(**fields)
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
    """Who is not here, has not left, and has an address that nobody else has."""
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
    for which, state in states.items():
        about = abouts.get(state["about"] or "")
        if (
            which in known
            or about is None
            or (email := about["email"].lower()) in taken
            or counts[email] > 1
        ):
            continue
        rows[which] = User(pk=which, **_fields(state, about))
    bulk_upsert(list(rows.values()))
    return set(rows)


def existing_events() -> Iterable[EventDraft]:
    for person in User.objects.all().iterator():
        yield "person.join", str(person.pk), person.event_payload()
        if person.banned:
            yield "person.ban", str(person.pk), {"at": person.banned}
        if person.left:
            yield "person.leave", str(person.pk), {"at": person.left}


def private_digests(state: State) -> list[str]:
    return [state["about"]] if state["about"] else []


AGGREGATE_TYPE = AggregateType(
    "person",
    {"join": PersonJoined, "about": ProfileChanged, "grant": RightChanged, "ban": PersonBannedOrLeft, "unban": PersonUnbanned, "leave": PersonBannedOrLeft},
    fold, store, private_digests=private_digests, existing_events=existing_events, store_batch=store_batch,
)  # fmt: skip
