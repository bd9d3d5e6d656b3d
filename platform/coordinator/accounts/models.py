"""People."""

from datetime import datetime
from uuid import UUID

from django.apps import apps
from django.contrib.auth.models import AbstractBaseUser, BaseUserManager, PermissionsMixin
from django.db import models
from django.db.models.functions import Lower
from django.utils import timezone
from django.utils.functional import cached_property
from uuid6 import uuid7

from coordinator.accounts.enrolment import Enrolment as Enrolment
from coordinator.accounts.machines import Machine, machine_name, strip_unprintable
from coordinator.accounts.site_settings import SiteSettings
from coordinator.accounts.teams import Team, TeamInvitation, TeamMember
from coordinator.audit.log import record
from coordinator.eventlog import private_data
from coordinator.eventlog import writer as mirrors
from coordinator.eventlog.projection import current_state
from coordinator.lib.exceptions import UserError

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
    "shown_name",
]  # fmt: skip


def shown_name(pk: UUID | str, name: str, left: datetime | None) -> str:
    """Of a person, where only these columns were read."""
    return "somebody who left" if left else name or f"volunteer {str(pk)[-4:]}"


class UserManager(BaseUserManager):
    def create_user(self, email: str, password: str | None = None, **fields) -> "User":
        if not email:
            raise ValueError("a person needs an e-mail address")
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save()
        return user

    def create_superuser(self, email: str, password: str | None = None, **fields) -> "User":
        return self.create_user(
            email, password, **{**fields, "is_staff": True, "is_superuser": True}
        )

    def get_by_natural_key(self, email: str) -> "User":
        return self.get(email__iexact=email)


class User(AbstractBaseUser, PermissionsMixin):
    """A person, known by an e-mail address. `name` is what others see.

    Who is logged in is a volunteer; an organiser may create runs; staff may use the admin. Somebody who left is a row
    without a name or an address, kept for the runs and machines that others still see."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    email = models.EmailField(unique=True)
    name = models.CharField(max_length=60, blank=True, help_text="Shown to others.")
    is_active = models.BooleanField(default=True)
    is_staff = models.BooleanField(default=False)
    organiser = models.BooleanField(
        default=False, help_text="May create runs where the staff grant that."
    )
    ban_reason = models.CharField(max_length=300, blank=True)
    banned = models.DateTimeField(null=True, blank=True)
    left = models.DateTimeField(null=True, blank=True)
    date_joined = models.DateTimeField(default=timezone.now)

    USERNAME_FIELD = "email"
    EMAIL_FIELD = "email"
    REQUIRED_FIELDS = []
    objects = UserManager()

    class Meta:
        constraints = [models.UniqueConstraint(Lower("email"), name="one_person_an_address")]

    def __str__(self) -> str:
        return self.shown_name

    def save(self, *args, **kwargs) -> None:
        """However somebody comes to be, or changes a password or an address, other mirrors hear of it."""
        fields = kwargs.get("update_fields")
        if fields is not None and not {*fields} & {"name", "email", "password"}:
            return super().save(*args, **kwargs)
        with mirrors.log_transaction():
            fresh = self._state.adding
            super().save(*args, **kwargs)
            if fresh:
                mirrors.record("person.join", self.pk, self.event_payload())
            else:
                self.record_profile()

    def record_profile(self) -> None:
        """Name, address and password as they are now, where that is news; within `writer.log_transaction`."""
        known = current_state(f"person:{self.pk}")
        if known and not self.left and known["about"] != (about := self.event_payload()["about"]):
            mirrors.record("person.about", self.pk, {"about": about})

    def event_payload(self) -> dict:
        """To other writer; within `writer.log_transaction`."""
        kept = {"name": self.name, "email": self.email, "password": self.password}
        about = private_data.store(f"person:{self.pk}", kept)
        return {
            "about": about,
            "joined": self.date_joined,
            "organiser": self.organiser,
            "is_staff": self.is_staff,
        }

    @property
    def shown_name(self) -> str:
        """What others see: never the address."""
        return shown_name(self.id, self.name, self.left)

    @property
    def role(self) -> str:
        """ "staff", "organiser" or "volunteer"; who is not logged in is a visitor."""
        return "staff" if self.is_staff else "organiser" if self.may_create_runs else "volunteer"

    # ---- what they may do ------------------------------------------------------------------------------------

    @cached_property
    def may_create_runs(self) -> bool:
        granted = (
            self.is_staff
            or self.organiser
            or SiteSettings.current().organisers == SiteSettings.Organisers.EVERYBODY
        )
        return self.is_active and granted

    def has_perm(self, perm: str, obj=None) -> bool:
        """Staff may do in the admin whatever concerns this site; what Django and its helpers keep is for superusers."""
        return self._staff_of(perm.partition(".")[0]) or super().has_perm(perm, obj)

    def has_module_perms(self, app_label: str) -> bool:
        return self._staff_of(app_label) or super().has_module_perms(app_label)

    def _staff_of(self, app_label: str) -> bool:
        ours = apps.is_installed(f"coordinator.{app_label}")
        return self.is_active and self.is_staff and ours

    # ---- what is decided about them --------------------------------------------------------------------------

    def rename(self, name: str) -> bool:
        """By the person alone: nobody else names people."""
        name = " ".join(strip_unprintable(name).split())[:60]
        with mirrors.log_transaction():
            changed = User.objects.filter(pk=self.pk).exclude(name=name).update(name=name) == 1
            self.name = name
            if changed:
                self.record_profile()
                record("user.rename", self, actor=self)
        return changed

    def grant(self, right: str, actor, given: bool = True) -> bool:
        """`right`: "organiser" or "is_staff". False when it was so before. Raises UserError."""
        assert right in ("organiser", "is_staff")
        if right == "is_staff" and not actor.is_superuser:
            raise UserError("only a superuser makes people staff, or takes that from them")
        if right == "is_staff" and self == actor:
            raise UserError("nobody takes that from themselves: ask another superuser")
        with mirrors.log_transaction():
            changed = (
                User.objects.filter(pk=self.pk, **{right: not given}).update(**{right: given}) == 1
            )
            if changed:
                mirrors.record("person.grant", self.pk, {"right": right, "given": given})
                word = right.removeprefix("is_")
                record(f"user.{word if given else f'not_{word}'}", self, actor=actor)
        self.refresh_from_db(fields=[right])
        self.__dict__.pop("may_create_runs", None)
        return changed

    def ban(self, actor, reason: str) -> bool:
        """Out at once: sessions end, and their machines are revoked for good. False when they were banned before.
        Raises UserError."""
        if self == actor or (self.is_staff and not actor.is_superuser):
            raise UserError("nobody bans themselves, and only a superuser bans staff")
        with mirrors.log_transaction():
            still, now = User.objects.filter(pk=self.pk, banned=None, left=None), timezone.now()
            if still.update(is_active=False, banned=now, ban_reason=reason[:300]) != 1:
                return False
            mirrors.record("person.ban", self.pk, {"at": now})
            record("user.ban", self, actor=actor, reason=reason)
            for machine in self.machines.filter(revoked=None):
                machine.revoke(actor=actor, reason=reason)
        self.refresh_from_db()
        return True

    def unban(self, actor) -> bool:
        """They may log in again; revoked keys stay revoked, and machines enrol with new ones."""
        with mirrors.log_transaction():
            banned = User.objects.filter(pk=self.pk, banned__isnull=False, left=None)
            changed = banned.update(is_active=True, banned=None, ban_reason="") == 1
            if changed:
                mirrors.record(
                    "person.unban",
                    self.pk,
                    {"lifts": (current_state(f"person:{self.pk}") or {}).get("bans", [])},
                )
                record("user.unban", self, actor=actor)
        self.refresh_from_db()
        return changed
