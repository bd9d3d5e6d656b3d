"""People and their machines."""

import secrets
import time
from datetime import timedelta

from django.apps import apps
from django.contrib.auth.models import AbstractBaseUser, BaseUserManager, PermissionsMixin
from django.db import IntegrityError, models, transaction
from django.db.models.functions import Lower
from django.utils import timezone
from django.utils.functional import cached_property
from uuid6 import uuid7

from barnraise import wire
from coordinator.accounts.rules import SiteRules
from coordinator.accounts.teams import Invitation, Team, TeamMember
from coordinator.audit.log import record
from coordinator.refusals import Refused

CODE_ALPHABET = "BCDFGHJKLMNPQRSTVWXZ23456789"  # no vowels, nothing that looks like something else
CODE_MINUTES = 15

__all__ = ["Enrolment", "Invitation", "Machine", "Refused", "SiteRules", "Team", "TeamMember", "User"]


class UserManager(BaseUserManager):
    def create_user(self, email: str, password: str | None = None, **fields) -> "User":
        if not email:
            raise ValueError("a person needs an e-mail address")
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save()
        return user

    def create_superuser(self, email: str, password: str | None = None, **fields) -> "User":
        return self.create_user(email, password, **{**fields, "is_staff": True, "is_superuser": True})

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
    organiser = models.BooleanField(default=False, help_text="May create runs where the staff grant that.")
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

    @property
    def shown_name(self) -> str:
        """What others see: never the address."""
        if self.left:
            return "somebody who left"
        return self.name or f"volunteer {self.id.hex[-4:]}"

    @property
    def role(self) -> str:
        """ "staff", "organiser" or "volunteer"; who is not logged in is a visitor."""
        return "staff" if self.is_staff else "organiser" if self.may_create_runs else "volunteer"

    # ---- what they may do ------------------------------------------------------------------------------------

    @cached_property
    def may_create_runs(self) -> bool:
        granted = self.is_staff or self.organiser or SiteRules.current().organisers == SiteRules.Organisers.EVERYBODY
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
        name = " ".join(_printable(name).split())[:60]
        with transaction.atomic():
            changed = User.objects.filter(pk=self.pk).exclude(name=name).update(name=name) == 1
            self.name = name
            if changed:
                record("user.rename", self, actor=self)
        return changed

    def grant(self, right: str, actor, given: bool = True) -> bool:
        """`right`: "organiser" or "is_staff". False when it was so before. Raises Refused."""
        assert right in ("organiser", "is_staff")
        if right == "is_staff" and not actor.is_superuser:
            raise Refused("only a superuser makes people staff, or takes that from them")
        if right == "is_staff" and self == actor:
            raise Refused("nobody takes that from themselves: ask another superuser")
        with transaction.atomic():
            changed = User.objects.filter(pk=self.pk, **{right: not given}).update(**{right: given}) == 1
            if changed:
                word = right.removeprefix("is_")
                record(f"user.{word if given else f'not_{word}'}", self, actor=actor)
        self.refresh_from_db(fields=[right])
        self.__dict__.pop("may_create_runs", None)
        return changed

    def ban(self, actor, reason: str) -> bool:
        """Out at once: sessions end, and their machines are revoked for good. False when they were banned before.
        Raises Refused."""
        if self == actor or (self.is_staff and not actor.is_superuser):
            raise Refused("nobody bans themselves, and only a superuser bans staff")
        with transaction.atomic():
            still = User.objects.filter(pk=self.pk, banned=None, left=None)
            if still.update(is_active=False, banned=timezone.now(), ban_reason=reason[:300]) != 1:
                return False
            record("user.ban", self, actor=actor, reason=reason)
            for machine in self.machines.filter(revoked=None):
                machine.revoke(actor=actor, reason=reason)
        self.refresh_from_db()
        return True

    def unban(self, actor) -> bool:
        """They may log in again; revoked keys stay revoked, and machines enrol with new ones."""
        with transaction.atomic():
            banned = User.objects.filter(pk=self.pk, banned__isnull=False, left=None)
            changed = banned.update(is_active=True, banned=None, ban_reason="") == 1
            if changed:
                record("user.unban", self, actor=actor)
        self.refresh_from_db()
        return changed


class Machine(models.Model):
    """One of a person's PCs, known by its Ed25519 key."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    key = models.CharField(max_length=64, unique=True, editable=False)
    owner = models.ForeignKey(User, on_delete=models.CASCADE, related_name="machines")
    hostname = models.CharField(max_length=100, blank=True)
    system = models.CharField(max_length=100, blank=True)
    processor = models.CharField(max_length=100, blank=True)
    cores = models.PositiveIntegerField(default=0)
    memory_bytes = models.BigIntegerField(default=0)
    accelerator = models.CharField(max_length=100, blank=True)
    enrolled = models.DateTimeField(default=timezone.now)
    last_seen = models.DateTimeField(null=True, blank=True)
    revoked = models.DateTimeField(null=True, blank=True)
    revoked_reason = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ["-enrolled"]

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return self.hostname or f"machine {self.key[:8]}"

    def rename(self, name: str, *, actor=None) -> None:
        """What people see it called. "" goes back to its key. It keeps this name when it enrols again."""
        name = " ".join("".join(c for c in name if c.isprintable()).split())[:100]
        with transaction.atomic():
            Machine.objects.filter(pk=self.pk).update(hostname=name)
            record("machine.rename", self, actor=actor, name=name)
        self.hostname = name

    def revoke(self, *, actor=None, reason: str = "") -> bool:
        """From now on the site refuses it, and its peers hear of that. False when it was revoked before."""
        with transaction.atomic():
            still = Machine.objects.filter(pk=self.pk, revoked=None)
            changed = still.update(revoked=timezone.now(), revoked_reason=reason[:300]) == 1
            if changed:
                record("machine.revoke", self, actor=actor, reason=reason)
        self.refresh_from_db(fields=["revoked", "revoked_reason"])
        return changed


def _printable(value):
    """What a machine says of itself is shown to whoever approves it: nothing in it may hide, or turn text around."""
    return "".join(c for c in value if c.isprintable()) if isinstance(value, str) else value


class Enrolment(models.Model):
    """A machine's wish to belong to somebody, waiting for that person to approve its code in the browser."""

    class Decision(models.TextChoices):
        PENDING = "pending"
        APPROVED = "approved"
        REFUSED = "refused"

    code = models.CharField(max_length=20, primary_key=True)
    key = models.CharField(max_length=64, db_index=True)
    about = models.JSONField()  # wire.Machine
    decision = models.CharField(max_length=10, choices=Decision, default=Decision.PENDING)
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField()
    decided_by = models.ForeignKey(User, null=True, blank=True, on_delete=models.SET_NULL)
    machine = models.ForeignKey(Machine, null=True, blank=True, on_delete=models.CASCADE)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return self.code

    @classmethod
    def open(cls, request: wire.EnrolmentRequest) -> "Enrolment":
        """A fresh code for this key; an older one that nobody decided on is void."""
        now = timezone.now()
        with transaction.atomic():
            cls.objects.filter(key=request.key, decision=cls.Decision.PENDING).delete()
            for _ in range(5):
                text = "".join(secrets.choice(CODE_ALPHABET) for _ in range(8))
                try:
                    with transaction.atomic():
                        return cls.objects.create(
                            code=f"{text[:4]}-{text[4:]}",
                            key=request.key,
                            about={name: _printable(value) for name, value in request.machine.model_dump().items()},
                            created=now,
                            expires=now + timedelta(minutes=CODE_MINUTES),
                        )
                except IntegrityError:  # the code is taken; 28**8 of them make this rare
                    continue
        raise AssertionError("five codes in a row were taken")

    @classmethod
    def find(cls, code: str) -> "Enrolment | None":
        """By code as a person types it: small letters, no hyphen."""
        text = "".join(c for c in code.upper() if c in CODE_ALPHABET)
        return cls.objects.filter(code=f"{text[:4]}-{text[4:]}").first() if len(text) == 8 else None

    @property
    def status(self) -> str:
        """ "pending", "approved", "refused" or "expired"."""
        expired = self.decision == self.Decision.PENDING and timezone.now() >= self.expires
        return "expired" if expired else str(self.decision)

    def approve(self, user: User) -> Machine:
        """The machine is this person's from now on. Raises Refused."""
        about = wire.Machine.model_validate(self.about).model_dump()
        with transaction.atomic():
            self._decide(self.Decision.APPROVED, user)
            machine, created = Machine.objects.select_for_update().get_or_create(
                key=self.key, defaults={"owner": user, **about}
            )
            if machine.revoked:
                raise Refused("this machine's key was revoked; give the machine a new key and enrol it again")
            if machine.owner_id != user.pk:
                raise Refused("this machine belongs to somebody else here; give it a key of its own")
            if not created:
                about.pop("hostname")  # its owner may have renamed it
                Machine.objects.filter(pk=machine.pk).update(**about)
                machine.refresh_from_db()
            Enrolment.objects.filter(pk=self.pk).update(machine=machine)
            record("machine.enrol", machine, actor=user, again=not created)
        self.refresh_from_db()
        return machine

    def refuse(self, user: User | None = None) -> None:
        """Raises Refused when it was decided before."""
        with transaction.atomic():
            self._decide(self.Decision.REFUSED, user)
            record("machine.turn_away", self, actor=user)
        self.refresh_from_db()

    def _decide(self, decision: str, user: User | None) -> None:
        open_still = Enrolment.objects.filter(pk=self.pk, decision=self.Decision.PENDING, expires__gt=timezone.now())
        if open_still.update(decision=decision, decided_by=user) != 1:
            self.refresh_from_db()
            raise Refused(f"this code is {self.status}; run `barnraise login` on the machine for a new one")

    @property
    def expires_epoch(self) -> float:
        return self.expires.timestamp()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.expires_epoch - time.time())
