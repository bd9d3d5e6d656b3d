"""What the site knows of a machine: whether its owner paused it, and what it measured."""

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.db import models
from django.utils import timezone

from barnraise.planning.hardware import Hardware
from barnraise.protocol import reports
from barnraise.protocol.checkups import Checkup
from coordinator.accounts.models import Machine
from coordinator.audit.log import record
from coordinator.eventlog import writer


class MachinePause(models.Model):
    """A pause that the owner of a machine ordered; it lasts as long as the row exists.

    The machine takes no steps in any run: its directives have the status "paused". It keeps its
    state, stays connected, and continues by itself once the row is deleted.
    """

    if TYPE_CHECKING:
        by_id: UUID | None

    machine = models.OneToOneField(
        Machine, primary_key=True, on_delete=models.CASCADE, related_name="pause"
    )
    since = models.DateTimeField(default=timezone.now)
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )

    def __str__(self) -> str:
        return f"{self.machine} is paused"

    def event_payload(self) -> dict[str, Any]:
        """Build the payload of "pause.start"."""
        return {"at": self.since, "by": self.by_id}

    @classmethod
    def start(cls, machine: Machine, *, actor: Any = None) -> bool:
        """Pause a machine; False if it is paused already, or was revoked."""
        with writer.log_transaction():
            if not Machine.objects.select_for_update().filter(pk=machine.pk, revoked=None).exists():
                return False
            pause, created = cls.objects.get_or_create(machine=machine, defaults={"by": actor})
            if created:
                writer.record("pause.start", machine.key, pause.event_payload())
                record("machine.pause", machine, actor=actor)
        return created

    @classmethod
    def end(cls, machine: Machine, *, actor: Any = None) -> bool:
        """Let a machine continue; False if it is not paused."""
        with writer.log_transaction():
            deleted = cls.objects.filter(machine=machine).delete()[0] == 1
            if deleted:
                writer.record("pause.end", machine.key, {})
                record("machine.resume", machine, actor=actor)
        return deleted


class HardwareMeasurement(models.Model):
    """What a machine can do, as it measured when it last joined a run: a `reports.HardwareView`."""

    machine = models.OneToOneField(
        Machine, primary_key=True, on_delete=models.CASCADE, related_name="measured"
    )
    hardware_view = models.JSONField()
    at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"the hardware of {self.machine}"

    @classmethod
    def record(cls, machine: Machine, hardware: reports.HardwareView) -> None:
        """Store a measurement in place of the machine's earlier one."""
        columns = {"hardware_view": hardware.model_dump(mode="json"), "at": timezone.now()}
        cls.objects.update_or_create(machine=machine, defaults=columns)

    @property
    def hardware(self) -> Hardware:
        """The measurement in the form that the planner takes."""
        view = reports.HardwareView.model_validate(self.hardware_view)
        return Hardware.from_json(view.model_dump_json())


class MachineCheckup(models.Model):
    """What `barnraise doctor` found on a machine when it ran last: a `checkups.Checkup`."""

    machine = models.OneToOneField(
        Machine, primary_key=True, on_delete=models.CASCADE, related_name="checkup"
    )
    content = models.JSONField()
    at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"the checkup of {self.machine}"

    @classmethod
    def record(cls, machine: Machine, checkup: Checkup) -> None:
        """Store a result in place of the machine's earlier one."""
        columns = {"content": checkup.model_dump(mode="json"), "at": timezone.now()}
        cls.objects.update_or_create(machine=machine, defaults=columns)


def is_paused(machine: Machine) -> bool:
    """Return whether the owner paused this machine; no query if `pause` was selected with it."""
    return getattr(machine, "pause", None) is not None


def measured_hardware(machine: Machine) -> Hardware | None:
    """Return what the machine measured; None before it has joined a run."""
    measurement = getattr(machine, "measured", None)
    return measurement.hardware if measurement else None
