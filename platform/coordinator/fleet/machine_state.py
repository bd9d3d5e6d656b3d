"""What the site knows of a machine beyond its key: whether its owner lets it rest, and what it measured of itself."""

from django.conf import settings
from django.db import models
from django.utils import timezone

from barnraise.planning.hardware import Hardware
from barnraise.protocol import reports
from coordinator.accounts.models import Machine
from coordinator.audit.log import record
from coordinator.eventlog import writer as mirrors


class Rest(models.Model):
    """While this row is there the machine takes no steps, in whichever run: its directives say "paused". It keeps its
    state, stays connected, and goes on by itself once the row is gone."""

    machine = models.OneToOneField(
        Machine, primary_key=True, on_delete=models.CASCADE, related_name="rest"
    )
    since = models.DateTimeField(default=timezone.now)
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )

    def __str__(self) -> str:
        return f"{self.machine} rests"

    @property
    def told(self) -> dict:
        """To other mirrors."""
        return {"at": self.since, "by": self.by_id}

    @classmethod
    def begin(cls, machine: Machine, *, actor=None) -> bool:
        """False when it rests already, or was revoked."""
        with mirrors.log_transaction():
            if not Machine.objects.select_for_update().filter(pk=machine.pk, revoked=None).exists():
                return False
            rest, begun = cls.objects.get_or_create(machine=machine, defaults={"by": actor})
            if begun:
                mirrors.record("rest.begin", machine.key, rest.told)
                record("machine.pause", machine, actor=actor)
        return begun

    @classmethod
    def end(cls, machine: Machine, *, actor=None) -> bool:
        """False when it does not rest."""
        with mirrors.log_transaction():
            ended = cls.objects.filter(machine=machine).delete()[0] == 1
            if ended:
                mirrors.record("rest.end", machine.key, {})
                record("machine.resume", machine, actor=actor)
        return ended


class Measured(models.Model):
    """What a machine can do, as it measured itself and told when it last joined a run: a `wire.HardwareView`."""

    machine = models.OneToOneField(
        Machine, primary_key=True, on_delete=models.CASCADE, related_name="measured"
    )
    told = models.JSONField()
    at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"{self.machine}, measured"

    @classmethod
    def note(cls, machine: Machine, told: reports.HardwareView) -> None:
        cls.objects.update_or_create(
            machine=machine, defaults={"told": told.model_dump(mode="json"), "at": timezone.now()}
        )

    @property
    def hardware(self) -> Hardware:
        """As the planner takes it."""
        return Hardware.from_json(reports.HardwareView.model_validate(self.told).model_dump_json())


def rests(machine: Machine) -> bool:
    """Whether it does; no query where `rest` was selected with the machine."""
    return getattr(machine, "rest", None) is not None


def measured(machine: Machine) -> Hardware | None:
    found = getattr(machine, "measured", None)
    return found.hardware if found else None
