"""What the site knows of a machine: whether its owner paused it, and what it measured."""

from datetime import datetime
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
from coordinator.runs.tickets import OwnPause


class MachinePause(models.Model):
    """A pause that the owner of a machine ordered: until the row is deleted, or a time has come.

    The machine takes no steps in any run: its directives have the status "paused". It keeps its
    state, stays connected, and then continues by itself.
    """

    if TYPE_CHECKING:
        by_id: UUID | None

    machine = models.OneToOneField(
        Machine, primary_key=True, on_delete=models.CASCADE, related_name="pause"
    )
    since = models.DateTimeField(default=timezone.now)
    until = models.DateTimeField(null=True)
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )

    def __str__(self) -> str:
        return f"{self.machine} is paused"

    def event_payload(self) -> dict[str, Any]:
        """Build the payload of "pause.start"."""
        return {"at": self.since, "until": self.until, "by": self.by_id}

    @property
    def is_active(self) -> bool:
        """Whether it lasts still."""
        return self.until is None or timezone.now() < self.until

    @classmethod
    def start(cls, machine: Machine, *, actor: Any = None, until: datetime | None = None) -> bool:
        """Pause a machine; False if it is paused already, or was revoked."""
        with writer.log_transaction():
            if not Machine.objects.select_for_update().filter(pk=machine.pk, revoked=None).exists():
                return False
            before = cls.objects.filter(machine=machine).first()
            if before is not None and before.is_active:
                return False
            fields = {"since": timezone.now(), "until": until, "by": actor}
            pause, _ = cls.objects.update_or_create(machine=machine, defaults=fields)
            writer.record("pause.start", machine.key, pause.event_payload())
            record("machine.pause", machine, actor=actor)
        return True

    @classmethod
    def end(cls, machine: Machine, *, actor: Any = None) -> bool:
        """Let a machine continue; False if it is not paused."""
        with writer.log_transaction():
            pause = cls.objects.filter(machine=machine).first()
            if pause is None:
                return False
            pause.delete()
            writer.record("pause.end", machine.key, {})
            if pause.is_active:
                record("machine.resume", machine, actor=actor)
        return pause.is_active


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
    return find_own_pause(machine) is not None


def find_own_pause(machine: Machine) -> OwnPause | None:
    """Return the pause that the owner ordered, as directives state it; None if there is none."""
    pause: MachinePause | None = getattr(machine, "pause", None)
    if pause is None or not pause.is_active:
        return None
    return OwnPause(pause.until.timestamp() if pause.until else None)


def measured_hardware(machine: Machine) -> Hardware | None:
    """Return what the machine measured; None before it has joined a run."""
    measurement = getattr(machine, "measured", None)
    return measurement.hardware if measurement else None
