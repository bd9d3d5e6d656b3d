"""People; re-exports the other models of this app for Django."""

from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from allauth.mfa.models import Authenticator
from django.apps import apps
from django.contrib.auth.models import AbstractBaseUser, BaseUserManager, PermissionsMixin
from django.db import models
from django.db.models.functions import Lower
from django.utils import timezone
from django.utils.functional import cached_property
from uuid6 import uuid7

from coordinator.accounts.enrolment import Enrolment
from coordinator.accounts.machines import (
    Machine,
    machine_name,
    marked_name,
    strip_unprintable,
)
from coordinator.accounts.site_settings import SiteSettings
from coordinator.accounts.teams import Team, TeamInvitation, TeamMember
from coordinator.audit.log import record
from coordinator.eventlog import private_data, writer
from coordinator.eventlog.projection import current_state
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError

if TYPE_CHECKING:
    from django.db.models.manager import ManyToManyRelatedManager, RelatedManager

__all__ = [
    "Enrolment",
    "Machine",
    "SiteSettings",
    "Team",
    "TeamInvitation",
    "TeamMember",
    "User",
    "UserError",
    "machine_name",
    "marked_name",
    "shown_name",
]


def shown_name(pk: UUID | str, name: str, left: datetime | None) -> str:
    """Return what others see of a person, from these columns alone."""
    if left:
        return "somebody who left"
    return name or f"volunteer {str(pk)[-4:]}"


class UserManager(BaseUserManager["User"]):
    """Creates people."""

    def create_user(self, email: str, password: str | None = None, **fields: Any) -> "User":
        """Create a person."""
        if not email:
            raise ValueError("a person needs an email address")
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save()
        return user

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> "User":
        """Create a person with every permission."""
        return self.create_user(
            email, password, **{**fields, "is_staff": True, "is_superuser": True}
        )

    def get_by_natural_key(self, email: str) -> "User":
        """Find a person by address, whatever its case."""
        return self.get(email__iexact=email)


class User(AbstractBaseUser, PermissionsMixin):
    """A person, known by an email address; others see the `name`.

    A signed-in person is a volunteer; an organiser may create runs; staff may use the admin.
    A person whose account was deleted stays as a row without name and address, for the runs and
    machines that others still see.
    """

    if TYPE_CHECKING:
        machines: RelatedManager[Machine]
        teams: ManyToManyRelatedManager[Team, TeamMember]
        team_memberships: RelatedManager[TeamMember]
        # The models of these belong to apps that import this one.
        runs: RelatedManager[Any]
        tokens: RelatedManager[Any]
        notifications: RelatedManager[Any]
        webhooks: RelatedManager[Any]

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    email = models.EmailField("email address", unique=True)
    name = models.CharField(max_length=60, blank=True, help_text="Visible to others.")
    is_active = models.BooleanField("active", default=True)
    is_staff = models.BooleanField("staff", default=False)
    organiser = models.BooleanField(
        default=False, help_text="May create runs where only organisers may."
    )
    ban_reason = models.CharField(max_length=300, blank=True)
    banned = models.DateTimeField(null=True, blank=True)
    left = models.DateTimeField("account deleted", null=True, blank=True)
    date_joined = models.DateTimeField("joined", default=timezone.now)

    USERNAME_FIELD = "email"
    EMAIL_FIELD = "email"
    REQUIRED_FIELDS = []
    objects: ClassVar[Any] = UserManager()

    class Meta:
        constraints = [models.UniqueConstraint(Lower("email"), name="one_person_an_address")]

    def __str__(self) -> str:
        return self.shown_name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save, and record a new person or a changed name, address or password in the event log."""
        fields = kwargs.get("update_fields")
        if fields is not None and not {*fields} & {"name", "email", "password"}:
            return super().save(*args, **kwargs)
        with writer.log_transaction():
            is_new = self._state.adding
            super().save(*args, **kwargs)
            if is_new:
                writer.record("person.join", self.pk, self.event_payload())
            else:
                self.record_profile()

    def record_profile(self) -> None:
        """Record name, address and password if they changed, within `log_transaction`."""
        state = current_state(f"person:{self.pk}")
        if not state or self.left:
            return
        content_digest = self.event_payload()["content_digest"]
        if state["content_digests"].get(site_identity.identity().key) != content_digest:
            writer.record("person.change_profile", self.pk, {"content_digest": content_digest})

    def event_payload(self) -> dict[str, Any]:
        """Build the payload of "person.join", within `log_transaction`; store its private data."""
        profile = {"name": self.name, "email": self.email, "password": self.password}
        return {
            "content_digest": private_data.store(f"person:{self.pk}", profile),
            "joined": self.date_joined,
            "organiser": self.organiser,
        }

    @property
    def shown_name(self) -> str:
        """What others see: never the address."""
        return shown_name(self.id, self.name, self.left)

    @property
    def role(self) -> str:
        """One of "staff", "organiser" and "volunteer"."""
        if self.is_staff:
            return "staff"
        return "organiser" if self.may_create_runs else "volunteer"

    # ---- permissions -------------------------------------------------------------------------

    @cached_property
    def acts_as_staff(self) -> bool:
        """Whether the person has the powers of staff now: they need a second factor, too.

        A password that was guessed or stolen elsewhere would otherwise be every run of the site.
        """
        return self.is_active and self.is_staff and self.has_second_factor()

    def has_second_factor(self) -> bool:
        """Return whether a log-in asks for more than the password."""
        factors = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
        return Authenticator.objects.filter(user=self, type__in=factors).exists()

    def renounce_staff_powers(self) -> None:
        """Act as a volunteer until this object is dropped, as scripts do: no token is staff."""
        vars(self)["acts_as_staff"] = False

    @cached_property
    def may_create_runs(self) -> bool:
        """Whether the person may create runs on this site."""
        if not self.is_active:
            return False
        if self.acts_as_staff or self.organiser:
            return True
        return SiteSettings.current().organisers == SiteSettings.Organisers.EVERYBODY

    def has_perm(self, perm: str, obj: Any = None) -> bool:
        """Allow staff whatever concerns this site's own apps; the rest is for superusers."""
        return self._is_staff_for(perm.partition(".")[0]) or super().has_perm(perm, obj)

    def has_module_perms(self, app_label: str) -> bool:
        """Allow staff this site's own apps."""
        return self._is_staff_for(app_label) or super().has_module_perms(app_label)

    def _is_staff_for(self, app_label: str) -> bool:
        is_own_app = apps.is_installed(f"coordinator.{app_label}")
        return is_own_app and self.acts_as_staff

    # ---- decisions about the person ----------------------------------------------------------

    def rename(self, name: str) -> bool:
        """Change the name, which only the person does; False if it is the same."""
        name = " ".join(strip_unprintable(name).split())[:60]
        with writer.log_transaction():
            changed = User.objects.filter(pk=self.pk).exclude(name=name).update(name=name) == 1
            self.name = name
            if changed:
                self.record_profile()
                record("user.rename", self, actor=self)
        return changed

    def grant(self, right: str, actor: Any, given: bool = True) -> bool:
        """Give the person the right "organiser" or "is_staff", or withdraw it.

        Returns:
            False if nothing changed.

        Raises:
            UserError: the actor may not decide this.
        """
        assert right in ("organiser", "is_staff")
        if right == "is_staff" and not actor.is_superuser:
            raise UserError("only a superuser makes people staff, or takes that from them")
        if right == "is_staff" and self == actor:
            raise UserError("nobody takes that from themselves: ask another superuser")
        if right == "is_staff" and given and not self.has_second_factor():
            raise UserError(
                f"{self.shown_name} has no second factor yet, and a thief of the password could "
                "set one up: ask them to add an authenticator app or a passkey first"
            )
        with writer.log_transaction():
            rows = User.objects.filter(pk=self.pk, **{right: not given})
            changed = rows.update(**{right: given}) == 1
            if changed:
                if right == "organiser":  # staff rights are each site's own
                    writer.record("person.change_right", self.pk, {"right": right, "given": given})
                label = right.removeprefix("is_")
                record(f"user.{label if given else f'not_{label}'}", self, actor=actor)
        self.refresh_from_db(fields=[right])
        for cached in ("may_create_runs", "acts_as_staff"):
            vars(self).pop(cached, None)
        return changed

    def ban(self, actor: Any, reason: str) -> bool:
        """Ban the person at once: sessions end, and their machines are revoked permanently.

        Returns:
            False if they are banned already.

        Raises:
            UserError: the actor may not decide this.
        """
        if self == actor or (self.is_staff and not actor.is_superuser):
            raise UserError("nobody bans themselves, and only a superuser bans staff")
        with writer.log_transaction():
            now = timezone.now()
            rows = User.objects.filter(pk=self.pk, banned=None, left=None)
            if rows.update(is_active=False, banned=now, ban_reason=reason[:300]) != 1:
                return False
            writer.record("person.ban", self.pk, {"at": now})
            record("user.ban", self, actor=actor, reason=reason)
            for machine in self.machines.filter(revoked=None):
                machine.revoke(actor=actor, reason=reason)
        self.refresh_from_db()
        return True

    def unban(self, actor: Any) -> bool:
        """Lift the ban; revoked keys stay revoked, so machines enrol again with new keys.

        Returns:
            False if the person is not banned.
        """
        with writer.log_transaction():
            banned = User.objects.filter(pk=self.pk, banned__isnull=False, left=None)
            changed = banned.update(is_active=True, banned=None, ban_reason="") == 1
            if changed:
                state = current_state(f"person:{self.pk}") or {}
                own_bans = state.get("bans", {}).get(site_identity.identity().key, {})
                writer.record("person.unban", self.pk, {"lifts": list(own_bans)})
                record("user.unban", self, actor=actor)
        self.refresh_from_db()
        return changed
