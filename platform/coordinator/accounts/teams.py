"""Teams of people who lend their machines together, and invitations into them."""

import hashlib
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, models, transaction
from django.db.models.functions import Lower
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record
from coordinator.audit.models import AuditEntry
from coordinator.eventlog import writer
from coordinator.eventlog.projection import current_state
from coordinator.lib.exceptions import UserError
from coordinator.lib.slugs import slug_of

MAX_TEAMS_PER_PERSON = 20
MAX_INVITATIONS_PER_DAY = 20  # by one person, so that nobody sends spam through the site
INVITATION_DAYS = 14
# /teams/new/ and /teams/invitations/ are pages, and "team" says nothing about one.
RESERVED_SLUGS = ("new", "invitations", "team")


class Team(models.Model):
    """A team."""

    if TYPE_CHECKING:
        members: Any
        invitations: Any

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    slug = models.SlugField(max_length=80, unique=True, editable=False)
    name = models.CharField(max_length=60)
    created = models.DateTimeField(default=timezone.now, editable=False)
    people = models.ManyToManyField(
        settings.AUTH_USER_MODEL, through="TeamMember", related_name="teams"
    )

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(Lower("name"), name="one_team_a_name")]

    def __str__(self) -> str:
        return self.name

    def get_absolute_url(self) -> str:
        """Return the path of the team's page."""
        return f"/teams/{quote(self.slug)}/"

    @classmethod
    def create(cls, name: str, actor: Any) -> "Team":
        """Create a team with one member, who leads it.

        Raises:
            UserError: the name is not valid or in use, or the person is in too many teams.
        """
        name, pk = clean_team_name(name), uuid7()
        slug = slug_of(name) or str(pk)
        if slug in RESERVED_SLUGS or cls.objects.filter(slug=slug).exists():
            slug = f"{slug}-{pk.hex[-8:]}"
        if actor.team_memberships.count() >= MAX_TEAMS_PER_PERSON:
            raise UserError(f"nobody is in more than {MAX_TEAMS_PER_PERSON} teams: leave one first")
        try:
            with writer.log_transaction():
                team = cls.objects.create(id=pk, slug=slug, name=name)
                first = team.members.create(person=actor, leads=True)
                payload = {
                    "name": name,
                    "slug": slug,
                    "created": team.created,
                    **first.event_payload(),
                }
                writer.record("team.create", pk, payload)
                record("team.create", team, actor=actor)
        except IntegrityError:
            raise UserError(f"there is a team called {name} already: choose another name") from None
        return team

    def rename(self, name: str, actor: Any) -> None:
        """Change the name; the URL stays.

        Raises:
            UserError: the name is not valid, or in use.
        """
        name, before = clean_team_name(name), self.name
        try:
            with writer.log_transaction():
                Team.objects.filter(pk=self.pk).update(name=name)
                self.name = name
                writer.record("team.rename", self.pk, {"name": name})
                record("team.rename", self, actor=actor, before=before)
        except IntegrityError:
            self.name = before
            raise UserError(f"there is a team called {name} already: choose another name") from None

    def may_lead(self, person: Any) -> bool:
        """Return whether this person may rename the team, invite and remove people."""
        return (
            bool(getattr(person, "pk", None))
            and self.members.filter(person=person, leads=True).exists()
        )

    def add_member(self, person: Any, actor: Any) -> bool:
        """Add a person; False if they are in it already.

        Raises:
            UserError: the person is in too many teams.
        """
        if person.team_memberships.count() >= MAX_TEAMS_PER_PERSON:
            raise UserError(f"nobody is in more than {MAX_TEAMS_PER_PERSON} teams: leave one first")
        with writer.log_transaction():
            member, fresh = TeamMember.objects.get_or_create(team=self, person=person)
            if fresh:
                writer.record("team.join", self.pk, member.event_payload())
                record("team.join", self, actor=actor, person=person.pk)
        return fresh

    def remove_member(self, person: Any, actor: Any) -> bool:
        """Remove a person, at their own wish or not.

        If nobody leads the team then, the longest member does. A team without members is disbanded.

        Returns:
            False if the person is not in the team.
        """
        with writer.log_transaction():
            memberships = self._list_membership_ids(person)
            if not self.members.filter(person=person).delete()[0]:
                return False
            writer.record("team.leave", self.pk, {"memberships": memberships})
            record(
                "team.leave" if actor == person else "team.remove",
                self,
                actor=actor,
                person=person.pk,
            )
            if not self.members.exists():
                self.disband(actor)
            elif not self.members.filter(leads=True).exists():
                self.promote(self.members.order_by("joined", "pk").first().person, actor)
        return True

    def promote(self, person: Any, actor: Any) -> bool:
        """Let a member lead the team too; False if they do already."""
        with writer.log_transaction():
            changed = self.members.filter(person=person, leads=False).update(leads=True) == 1
            if changed:
                memberships = self._list_membership_ids(person)
                writer.record("team.promote", self.pk, {"memberships": memberships})
                record("team.promote", self, actor=actor, person=person.pk)
        return changed

    def disband(self, actor: Any, reason: str = "") -> None:
        """Delete the team; its people and machines stay."""
        with writer.log_transaction():
            record("team.disband", self, actor=actor, reason=reason)
            pk = self.pk
            self.delete()
            writer.record("team.disband", pk, {})

    def _list_membership_ids(self, person: Any) -> list[str]:
        """List the ids of the person's memberships.

        There are several if several mirrors added the person at the same time.
        """
        members = (current_state(f"team:{self.pk}") or {}).get("members", [])
        return [
            membership
            for member in members
            if member["person"] == str(person.pk)
            for membership in member["memberships"]
        ]


class TeamMember(models.Model):
    """A person's membership of a team."""

    if TYPE_CHECKING:
        person_id: UUID

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="members")
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="team_memberships"
    )
    leads = models.BooleanField(default=False)
    joined = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["joined", "pk"]
        constraints = [
            models.UniqueConstraint(fields=["team", "person"], name="one_membership_a_team")
        ]

    def __str__(self) -> str:
        return f"{self.person} in {self.team}"

    def event_payload(self) -> dict[str, Any]:
        """Build the payload of "team.join"."""
        return {
            "membership": self.pk,
            "person": self.person_id,
            "joined": self.joined,
            "leads": self.leads,
        }


class TeamInvitation(models.Model):
    """An emailed invitation: one person with its link and an account may join, once.

    The row stores the address and the digest of the link's secret, and is deleted with the answer.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="invitations")
    email = models.EmailField()
    token_digest = models.CharField(max_length=64, unique=True, editable=False)
    by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField()

    class Meta:
        ordering = ["-created"]
        constraints = [
            models.UniqueConstraint("team", Lower("email"), name="one_invitation_an_address")
        ]

    def __str__(self) -> str:
        return f"an invitation to {self.team}"

    @classmethod
    def send(cls, team: Team, email: str, actor: Any) -> tuple["TeamInvitation", str]:
        """Create an invitation, in place of an older one to the same address.

        Returns:
            The invitation, and the secret of its link.

        Raises:
            UserError: the person has sent too many today.
        """
        # The audit log counts them, because an answered invitation has no row.
        today = timezone.now() - timedelta(days=1)
        if (
            AuditEntry.objects.filter(action="team.invite", actor=actor, at__gt=today).count()
            >= MAX_INVITATIONS_PER_DAY
        ):
            raise UserError(
                f"you have sent {MAX_INVITATIONS_PER_DAY} invitations today: send more tomorrow"
            )
        token = secrets.token_urlsafe(32)
        with transaction.atomic():
            team.invitations.filter(email__iexact=email).delete()
            expires = timezone.now() + timedelta(days=INVITATION_DAYS)
            invitation = cls.objects.create(
                team=team,
                email=email.lower(),
                token_digest=_digest(token),
                by=actor,
                expires=expires,
            )
            record("team.invite", team, actor=actor, invitation=invitation.pk)
        return invitation, token

    @classmethod
    def find(cls, token: str) -> "TeamInvitation | None":
        """Find a valid invitation by the secret of its link."""
        valid = cls.objects.filter(token_digest=_digest(token[:100]), expires__gt=timezone.now())
        return valid.select_related("team", "by").first()

    def accept(self, person: Any) -> None:
        """Add the person to the team.

        Raises:
            UserError: the invitation is not valid.
        """
        with writer.log_transaction():
            if not TeamInvitation.objects.filter(pk=self.pk, expires__gt=timezone.now()).delete()[
                0
            ]:
                raise UserError(
                    "this invitation was used or withdrawn meanwhile: ask for another one"
                )
            self.team.add_member(person, person)

    def withdraw(self, actor: Any) -> None:
        """Delete it: the team withdraws it, or the receiver declines."""
        with transaction.atomic():
            if TeamInvitation.objects.filter(pk=self.pk).delete()[0]:
                record("team.uninvite", self.team, actor=actor, invitation=self.pk)


def clean_team_name(name: str) -> str:
    """Normalise a team's name.

    Raises:
        UserError: it is empty or too long.
    """
    name = " ".join("".join(c for c in name if c.isprintable() or c.isspace()).split())
    if not 1 <= len(name) <= 60:
        raise UserError("give the team a name of 1 to 60 characters")
    return name


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
