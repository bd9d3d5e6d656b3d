"""The Django app `telemetry`."""

from typing import Any

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    """Reports, rollups and checkpoints."""

    name = "coordinator.telemetry"

    def ready(self) -> None:
        """Register the replicated types and the receiver of deleted accounts."""
        from coordinator.accounts.signals import account_deleted
        from coordinator.eventlog import registry
        from coordinator.telemetry.replicated import checkpoints, task_scores

        registry.register(checkpoints.AGGREGATE_TYPE, task_scores.AGGREGATE_TYPE)
        account_deleted.connect(on_account_deleted, dispatch_uid="telemetry account_deleted")


def on_account_deleted(sender: type, person: Any, **kwargs: Any) -> None:
    """Delete what the person's machines have reported for their owner alone."""
    from coordinator.telemetry.machine_history import MachineCondition, SystemReading

    MachineCondition.objects.filter(machine__owner=person).delete()
    SystemReading.objects.filter(machine__owner=person).delete()
