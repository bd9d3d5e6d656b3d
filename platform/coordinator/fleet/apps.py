"""Configure the fleet: its aggregate types, and what happens when an account is deleted."""

from typing import Any

from django.apps import AppConfig


class FleetConfig(AppConfig):
    """Configure the app."""

    name = "coordinator.fleet"

    def ready(self) -> None:
        """Register the aggregate types and the receiver of deleted accounts."""
        from coordinator.accounts.signals import account_deleted
        from coordinator.eventlog import registry
        from coordinator.fleet.replicated import machine_pauses, verdicts
        from coordinator.fleet.verdict_models import update_all_forces
        from coordinator.replication.mirror_list import list_changed

        registry.register(machine_pauses.AGGREGATE_TYPE, verdicts.AGGREGATE_TYPE)
        list_changed.connect(update_all_forces, dispatch_uid="fleet list_changed")
        account_deleted.connect(on_account_deleted, dispatch_uid="fleet account_deleted")


def on_account_deleted(sender: type, person: Any, **kwargs: Any) -> None:
    """Delete where the person's machines could be reached, what they are, and their pauses."""
    from coordinator.fleet.models import HardwareMeasurement, MachinePause, Membership

    Membership.objects.filter(machine__owner=person).update(addresses=[], source_address="")
    HardwareMeasurement.objects.filter(machine__owner=person).delete()
    for pause in MachinePause.objects.filter(machine__owner=person).select_related("machine"):
        MachinePause.end(pause.machine)
