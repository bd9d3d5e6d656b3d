"""Configure replication: its aggregate types, and the notice that other mirrors receive."""

from django.apps import AppConfig


class ReplicationConfig(AppConfig):
    """Configure the app."""

    name = "coordinator.replication"

    def ready(self) -> None:
        """Register the aggregate types; notify other mirrors of every event recorded here."""
        from coordinator.eventlog import registry, writer
        from coordinator.replication import leases, tasks, volunteer_salt

        registry.register(leases.AGGREGATE_TYPE, volunteer_salt.AGGREGATE_TYPE)
        writer.event_recorded.connect(tasks.on_event_recorded, dispatch_uid="replication notify")
