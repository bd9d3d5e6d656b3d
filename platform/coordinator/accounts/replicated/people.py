"""The aggregate type "person": that the person exists, rights, bans, and the account's deletion.

Name, address and password hash are private data, which is deleted with the account. Each mirror
records them as the person confirmed them there, by joining or signing in. Another mirror's record
never replaces a site's own; a site where the person never signed in uses the record of the mirror
where they joined. A ban binds the mirror that decided it, and all mirrors once half of them agree.
The reason of a ban stays at the mirror where it was decided, and so do staff rights.
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
from coordinator.lib import site_identity
from coordinator.lib.bulk_upsert import bulk_upsert
from coordinator.replication import mirror_list


class ProfileContent(Message):
    """Private data: name, address and password hash."""

    name: PlainText = Field(max_length=60)
    email: str = Field(max_length=254, pattern=r"^[^@\s\x00-\x1f]+@[^@\s\x00-\x1f]+$")
    password: str = Field(max_length=128, pattern=r"^[\x21-\x7e]*$")


class ProfileChanged(Message):
    """The person has another name, address or password; the digest is that of the private data."""

    content_digest: Digest


class PersonJoined(ProfileChanged):
    """The person created an account."""

    joined: AwareDatetime
    organiser: bool = False


class RightChanged(Message):
    """The staff gave or withdrew a right."""

    right: Literal["organiser"]
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
    mirror's ban counts until an unban of the same mirror names it. A deleted account is final and
    has no rights.
    """
    joins = [fact for fact in facts if fact.action == "join"]
    if not joins:
        return None
    organiser = joins[0].payload.organiser
    content_digests = {joins[0].mirror: joins[0].payload.content_digest}
    bans: dict[str, dict[str, str]] = {}
    left = None
    for fact in facts:
        if fact.action == "change_right":
            organiser = fact.payload.given
        elif fact.action == "change_profile":
            content_digests[fact.mirror] = fact.payload.content_digest
        elif fact.action == "ban":
            bans.setdefault(fact.mirror, {})[str(fact.id)] = fact.payload.at.isoformat()
        elif fact.action == "leave":
            left = left or fact.payload.at.isoformat()
    for fact in facts:
        for ban in fact.payload.lifts if fact.action == "unban" else ():
            bans.get(fact.mirror, {}).pop(ban, None)
    return {
        "home": joins[0].mirror,
        "content_digests": {} if left else content_digests,
        "joined": joins[0].payload.joined.isoformat(),
        "organiser": organiser and not left,
        "bans": {mirror: banned for mirror, banned in bans.items() if banned},
        "left": left,
    }


def content_digest_at(state: State, mirror: str) -> str | None:
    """Return the digest of the profile that a mirror uses; None if the account is deleted."""
    return state["content_digests"].get(mirror) or state["content_digests"].get(state["home"])


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
    own_key = site_identity.identity().key
    left = state["left"]
    fields = _row_fields(
        state, private_data.load(content_digest_at(state, own_key), ProfileContent)
    )
    person = people.first()
    if person is not None and (person.is_staff or person.is_superuser):
        # Staff are each site's own: no other mirror's event changes their account here.
        if own_key in state["content_digests"] or not left:
            people.update(organiser=state["organiser"])
        return
    if (
        "email" in fields
        and User.objects.filter(email__iexact=fields["email"]).exclude(pk=person_id).exists()
    ):
        del fields["email"]
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


def _row_fields(state: State, content: dict | None) -> dict:
    banned = banned_since(state)
    return {
        "date_joined": datetime.fromisoformat(state["joined"]),
        "organiser": state["organiser"],
        "banned": banned and datetime.fromisoformat(banned),
        "is_active": not banned and not state["left"],
    } | (content or {})


def banned_since(state: State) -> str | None:
    """Return since when the person is banned at this site; None if they are not."""
    if not state["bans"] or not mirror_list.binds_this_site(state["bans"]):
        return None
    own_bans = state["bans"].get(site_identity.identity().key)
    return min((own_bans or next(iter(state["bans"].values()))).values())


def store_batch(states: dict[str, State]) -> set[str]:
    """Write, all at once, new people whose address nobody else has."""
    own_key = site_identity.identity().key
    contents = private_data.load_many(
        [found for state in states.values() if (found := content_digest_at(state, own_key))],
        ProfileContent,
    )
    known = set(map(str, User.objects.filter(pk__in=states).values_list("pk", flat=True)))
    wanted = [content["email"].lower() for content in contents.values()]
    counts = Counter(wanted)
    taken = {
        *User.objects.annotate(l=Lower("email")).filter(l__in=wanted).values_list("l", flat=True)
    }
    rows = {}
    for person_id, state in states.items():
        content = contents.get(content_digest_at(state, own_key) or "")
        if (
            person_id in known
            or content is None
            or (email := content["email"].lower()) in taken
            or counts[email] > 1
        ):
            continue
        rows[person_id] = User(pk=person_id, **_row_fields(state, content))
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
    """Name the private data of the profile, of every mirror."""
    return sorted(set(state["content_digests"].values()))


AGGREGATE_TYPE = AggregateType(
    "person",
    {
        "join": PersonJoined,
        "change_profile": ProfileChanged,
        "change_right": RightChanged,
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
