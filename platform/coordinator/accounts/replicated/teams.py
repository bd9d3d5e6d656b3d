"""The aggregate type "team": its name and members.

Invitations are not replicated, because they contain an address.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from uuid import UUID

from django.db.models import Q
from pydantic import AwareDatetime, Field

from barnraise.protocol.types import Id, Message, PlainText
from coordinator.accounts.models import Team, TeamMember, User
from coordinator.eventlog import projection, uniqueness
from coordinator.eventlog.registry import (
    AggregateType,
    DependencyMissingError,
    EventDraft,
    Fact,
    State,
)
from coordinator.eventlog.registry import UniqueValues as Claimed


class TeamJoined(Message):
    """A person joined: they have a new place in the team."""

    place: Id
    person: Id
    joined: AwareDatetime
    leads: bool = False


class TeamCreated(TeamJoined):
    """A person created the team and has its first place."""

    name: PlainText = Field(max_length=60)
    slug: str = Field(pattern=r"^[0-9a-z_-]{1,80}$")
    created: AwareDatetime


class TeamRenamed(Message):
    """The team has another name."""

    name: PlainText = Field(max_length=60)


class TeamPlaces(Message):
    """The people with these places left, or lead the team now."""

    places: list[Id] = Field(max_length=100)


class TeamDisbanded(Message):
    """The team was disbanded."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Merge the events of a team.

    A person who leaves gives up the places that the event names; one who joined again elsewhere
    meanwhile stays. Of two places of one person the earlier counts. A team without members is
    deleted, and one without a leader is led by its longest member: mirrors that each removed one of
    the last two leaders agree without asking each other. Of names the last counts.
    """
    founded = next((fact for fact in facts if fact.action == "found"), None)
    if founded is None or any(fact.action == "disband" for fact in facts):
        return None
    given_up = {place for fact in facts if fact.action == "part" for place in fact.payload.places}
    promoted = {
        place for fact in facts if fact.action == "promote" for place in fact.payload.places
    }
    people: dict[str, list[TeamJoined]] = {}
    for fact in facts:
        if fact.action in ("found", "join") and fact.payload.place not in given_up:
            people.setdefault(fact.payload.person, []).append(fact.payload)
    if not people:
        return None
    members = [
        _fold_member(sorted(places, key=_membership_order), promoted) for places in people.values()
    ]
    members.sort(key=lambda member: (member["joined"], member["places"]))
    members[0]["leads"] |= not any(member["leads"] for member in members)
    named = [fact for fact in facts if fact.action == "rename"] or [founded]
    return {
        "slug": founded.payload.slug,
        "founded": [founded.hlc, str(founded.id)],
        "created": founded.payload.created.isoformat(),
        "name": named[-1].payload.name,
        "named": [named[-1].hlc, str(named[-1].id)],
        "members": members,
    }


def _membership_order(place: TeamJoined) -> tuple:
    return place.joined, place.place


def _fold_member(places: list[TeamJoined], promoted: set[str]) -> State:
    leads = any(place.leads or place.place in promoted for place in places)
    first, every = places[0], [place.place for place in places]
    return {
        "person": first.person,
        "places": every,
        "joined": first.joined.isoformat(),
        "leads": leads,
    }


def unique_values(state: State) -> Claimed:
    """Claim slug and name."""
    return {
        "team.slug": (state["slug"], *state["founded"]),
        "team.name": (state["name"].lower(), *state["named"]),
    }


def store(team_id: str, state: State | None) -> None:
    """Write the team's row and its members."""
    if state is None:
        deleted, _ = Team.objects.filter(pk=team_id).delete()
        if deleted:  # somebody may have joined at another mirror meanwhile: the team then returns
            projection.mark_reference_lost(f"team:{team_id}")
        return
    people = {member["person"] for member in state["members"]}
    known = User.objects.filter(pk__in=people).values_list("pk", flat=True)
    if missing := people - set(map(str, known)):
        raise DependencyMissingError(f"person:{min(missing)}")
    subject, tail = f"team:{team_id}", UUID(team_id).hex[-8:]
    slug, name = state["slug"], state["name"]
    if not uniqueness.owns_value(subject, "team.slug", slug):
        slug = f"{slug[:70]}-{tail}"
    if not uniqueness.owns_value(subject, "team.name", name.lower()):
        name = f"{name[:49]} ({tail})"
    for other in Team.objects.filter(Q(slug=slug) | Q(name__iexact=name)).exclude(pk=team_id):
        end = other.pk.hex[-8:]
        Team.objects.filter(pk=other.pk).update(
            slug=f"{other.slug[:70]}-{end}", name=f"{other.name[:49]} ({end})"
        )
        uniqueness.mark_for_rewrite(f"team:{other.pk}")
    fields = {"slug": slug, "name": name, "created": datetime.fromisoformat(state["created"])}
    if not Team.objects.filter(pk=team_id).update(**fields):
        Team.objects.bulk_create([Team(pk=team_id, **fields)])
    wanted = {member["places"][0]: member for member in state["members"]}
    there = {
        str(member.pk): str(member.person_id) for member in TeamMember.objects.filter(team=team_id)
    }
    stale = [
        place for place, person in there.items() if wanted.get(place, {}).get("person") != person
    ]
    TeamMember.objects.filter(pk__in=stale).delete()
    TeamMember.objects.bulk_create(
        [
            TeamMember(
                pk=place,
                team_id=team_id,
                person_id=member["person"],
                leads=member["leads"],
                joined=datetime.fromisoformat(member["joined"]),
            )
            for place, member in wanted.items()
        ],
        update_conflicts=True,
        unique_fields=["id"],
        update_fields=["team", "person", "leads", "joined"],
    )


def existing_events() -> Iterable[EventDraft]:
    """Describe the rows of a site that is older than its log."""
    for team in Team.objects.prefetch_related("members").iterator(chunk_size=200):
        if not team.members.all():
            continue
        first, *others = team.members.all()
        named = {"name": team.name, "slug": team.slug, "created": team.created}
        yield "team.found", str(team.pk), {**named, **first.event_payload()}
        for member in others:
            yield "team.join", str(team.pk), member.event_payload()


AGGREGATE_TYPE = AggregateType(
    "team",
    {
        "found": TeamCreated,
        "join": TeamJoined,
        "rename": TeamRenamed,
        "part": TeamPlaces,
        "promote": TeamPlaces,
        "disband": TeamDisbanded,
    },
    fold,
    store,
    unique_values,
    existing_events=existing_events,
)
