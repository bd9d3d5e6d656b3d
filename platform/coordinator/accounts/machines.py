"""People's machines: what they are called, what is in them, and whether their key was revoked."""

from collections.abc import Collection
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

from django.conf import settings
from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record
from coordinator.eventlog import private_data, writer
from coordinator.eventlog.projection import current_state
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.replication import mirror_list

BLANK_DESCRIPTION = {  # a `messages.MachineDescription` that says nothing
    "hostname": "",
    "system": "",
    "processor": "",
    "cores": 0,
    "memory_bytes": 0,
    "accelerator": "",
}

NUMBERED_LENGTH = 94  # characters of a name that a number follows

V = TypeVar("V")


def strip_unprintable(value: V) -> V:
    """Remove unprintable characters from a text; return any other value as it is.

    People see what others and their machines write about themselves. No character in it may be
    invisible or reverse the direction of the text.
    """
    if not isinstance(value, str):
        return value
    return cast("V", "".join(c for c in value if c.isprintable()))


MARK_DIGITS = 8  # of a key behind a name


def machine_name(hostname: str, key: str) -> str:
    """Return what a machine is called: its host name, or the beginning of its key."""
    return hostname or f"machine {key[:8]}"


def choose_free_name(name: str, used: Collection[str]) -> str:
    """Return a machine's name, with a number behind it if another machine has it. Pure."""
    if not name or name not in used:
        return name
    numbered = (f"{name[:NUMBERED_LENGTH]} {number}" for number in count(2))
    return next(free for free in numbered if free not in used)


def marked_name(name: str, key: str) -> str:
    """Return the name of one of a person's machines that are called alike: with its key's start."""
    return f"{name} ({key[:MARK_DIGITS]})"


class Machine(models.Model):
    """One of a person's computers, identified by its Ed25519 key."""

    if TYPE_CHECKING:
        owner_id: UUID
        memberships: Any

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    key = models.CharField(max_length=64, unique=True, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="machines"
    )
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
    # When its owner confirmed at this site, by name, that it may prepare the text of their runs.
    # The machine that does so can sign verdicts of the run as its owner.
    confirmed = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-enrolled"]
        # Few machines are revoked, and every directive lists those of its run.
        indexes = [
            models.Index(
                fields=["revoked"],
                condition=models.Q(revoked__isnull=False),
                name="machine_revoked",
            )
        ]

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save; a new machine is also recorded in the event log, for the other mirrors."""
        if not self._state.adding:
            return super().save(*args, **kwargs)
        with writer.log_transaction():
            super().save(*args, **kwargs)
            writer.record("machine.enrol", self.key, self.event_payload())

    def event_payload(self) -> dict[str, Any]:
        """Build the payload of "machine.enrol", within `log_transaction`."""
        description = {field: getattr(self, field) for field in BLANK_DESCRIPTION}
        return {
            "content_digest": private_data.store(f"machine:{self.key}", description),
            "id": self.pk,
            "owner": self.owner_id,
            "enrolled": self.enrolled,
        }

    def record_description(self) -> None:
        """Record the present name and hardware, within `log_transaction`."""
        content_digest = self.event_payload()["content_digest"]
        writer.record("machine.describe", self.key, {"content_digest": content_digest})

    @property
    def name(self) -> str:
        """What people see the machine called."""
        return machine_name(self.hostname, self.key)

    @classmethod
    def names_in_use(cls, owner: UUID, besides: str) -> set[str]:
        """Return the names of a person's machines, without revoked ones and the one of a key."""
        others = cls.objects.filter(owner=owner, revoked=None).exclude(key=besides)
        return set(others.values_list("hostname", flat=True))

    def rename(self, name: str, *, actor: Any = None) -> None:
        """Change the name that people see; "" goes back to the key.

        The machine keeps this name when it enrols again. A number follows it if another machine of
        its owner has it.
        """
        name = " ".join(strip_unprintable(name).split())[:100]
        with writer.log_transaction():
            name = choose_free_name(name, self.names_in_use(self.owner_id, besides=self.key))
            Machine.objects.filter(pk=self.pk).update(hostname=name)
            self.refresh_from_db()
            self.record_description()
            record("machine.rename", self, actor=actor, name=name)

    def confirm(self, *, actor: Any = None) -> bool:
        """Let this machine prepare the text of its owner's runs, and sign for those runs.

        Returns:
            False if it was confirmed before, or is revoked.
        """
        with transaction.atomic():
            waiting = Machine.objects.filter(pk=self.pk, confirmed=None, revoked=None)
            changed = waiting.update(confirmed=timezone.now()) == 1
            if changed:
                record("machine.confirm", self, actor=actor)
        self.refresh_from_db(fields=["confirmed", "revoked"])
        return changed

    def revoke(self, *, actor: Any = None, reason: str = "") -> bool:
        """Refuse this machine's key from now on, here and at its peers.

        Returns:
            False if it was revoked before.
        """
        with writer.log_transaction():
            now = timezone.now()
            valid = Machine.objects.filter(pk=self.pk, revoked=None)
            changed = valid.update(revoked=now, revoked_reason=reason[:300]) == 1
            if changed:
                writer.record("machine.revoke", self.key, {"at": now})
                record("machine.revoke", self, actor=actor, reason=reason)
        self.refresh_from_db(fields=["revoked", "revoked_reason"])
        return changed

    def reinstate(self, *, actor: Any = None) -> bool:
        """End a revocation that this site's staff decided.

        Returns:
            False if it is not revoked.

        Raises:
            UserError: Its owner revoked it, is banned or has left; or half of the mirrors revoke
                it.
        """
        if not self.owner.is_active:
            raise UserError("its owner is banned or has left")
        if self.revoked and not self.revoked_reason:
            raise UserError(
                "its owner revoked it, so it may be in other hands: they enrol it with a new key"
            )
        with writer.log_transaction():
            decided = current_state(f"machine:{self.key}") or {"revoked": {}}
            others = {*decided["revoked"]} - {site_identity.identity().key}
            if mirror_list.binds_this_site(others):
                raise UserError("half of the mirrors revoke it, and this site follows them")
            revoked = Machine.objects.filter(pk=self.pk, revoked__isnull=False)
            changed = revoked.update(revoked=None, revoked_reason="") == 1
            if changed:
                writer.record("machine.reinstate", self.key, {})
                record("machine.reinstate", self, actor=actor)
        self.refresh_from_db(fields=["revoked", "revoked_reason"])
        return changed
