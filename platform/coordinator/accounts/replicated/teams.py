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
    """A person joined."""

    membership: Id
    person: Id
    joined: AwareDatetime
    leads: bool = False


class TeamCreated(TeamJoined):
    """A person created the team and is its first member."""

    name: PlainText = Field(max_length=60)
    slug: str = Field(pattern=r"^[\w-]{1,80}$")
    created: AwareDatetime


class TeamRenamed(Message):
    """The team has another name."""

    name: PlainText = Field(max_length=60)


class TeamMemberships(Message):
    """These memberships ended, or these members lead the team now."""

    memberships: list[Id] = Field(max_length=100)


class TeamDisbanded(Message):
    """The team was disbanded."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Merge the events of a team.

    Leaving ends the memberships that the event names; a person who joined again elsewhere meanwhile
    stays. Of two memberships of one person the earlier counts. A team without members is
    deleted, and one without a leader is led by its longest member: mirrors that each removed one of
    the last two leaders agree without asking each other. Of names the last counts.
    """
    created = next((fact for fact in facts if fact.action == "create"), None)
    if created is None or any(fact.action == "disband" for fact in facts):
        return None
    ended = {
        membership
        for fact in facts
        if fact.action == "leave"
        for membership in fact.payload.memberships
    }
    promoted = {
        membership
        for fact in facts
        if fact.action == "promote"
        for membership in fact.payload.memberships
    }
    people: dict[str, list[TeamJoined]] = {}
    for fact in facts:
        if fact.action in ("create", "join") and fact.payload.membership not in ended:
            people.setdefault(fact.payload.person, []).append(fact.payload)
    if not people:
        return None
    members = [
        _fold_member(sorted(joins, key=_membership_order), promoted) for joins in people.values()
    ]
    members.sort(key=lambda member: (member["joined"], member["memberships"]))
    members[0]["leads"] |= not any(member["leads"] for member in members)
    renames = [fact for fact in facts if fact.action == "rename"] or [created]
    return {
        "slug": created.payload.slug,
        "slug_claim": [created.hlc, str(created.id)],
        "created": created.payload.created.isoformat(),
        "name": renames[-1].payload.name,
        "name_claim": [renames[-1].hlc, str(renames[-1].id)],
        "members": members,
    }


def _membership_order(join: TeamJoined) -> tuple:
    return join.joined, join.membership


def _fold_member(joins: list[TeamJoined], promoted: set[str]) -> State:
    first = joins[0]
    return {
        "person": first.person,
        "memberships": [join.membership for join in joins],
        "joined": first.joined.isoformat(),
        "leads": any(join.leads or join.membership in promoted for join in joins),
    }


def unique_values(state: State) -> Claimed:
    """Claim slug and name."""
    return {
        "team.slug": (state["slug"], *state["slug_claim"]),
        "team.name": (state["name"].lower(), *state["name_claim"]),
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
    wanted = {member["memberships"][0]: member for member in state["members"]}
    there = {
        str(member.pk): str(member.person_id) for member in TeamMember.objects.filter(team=team_id)
    }
    stale = [pk for pk, person in there.items() if wanted.get(pk, {}).get("person") != person]
    TeamMember.objects.filter(pk__in=stale).delete()
    TeamMember.objects.bulk_create(
        [
            TeamMember(
                pk=pk,
                team_id=team_id,
                person_id=member["person"],
                leads=member["leads"],
                joined=datetime.fromisoformat(member["joined"]),
            )
            for pk, member in wanted.items()
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
        columns = {"name": team.name, "slug": team.slug, "created": team.created}
        yield "team.create", str(team.pk), {**columns, **first.event_payload()}
        for member in others:
            yield "team.join", str(team.pk), member.event_payload()


AGGREGATE_TYPE = AggregateType(
    "team",
    {
        "create": TeamCreated,
        "join": TeamJoined,
        "rename": TeamRenamed,
        "leave": TeamMemberships,
        "promote": TeamMemberships,
        "disband": TeamDisbanded,
    },
    fold,
    store,
    unique_values,
    existing_events=existing_events,
)
