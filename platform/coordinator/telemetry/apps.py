"""The Django app `telemetry`."""

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    """Reports, rollups and checkpoints."""

    name = "coordinator.telemetry"
    label = "telemetry"

    def ready(self) -> None:
        """Register the replicated types."""
        from coordinator.eventlog import registry
        from coordinator.telemetry.replicated import checkpoints

        registry.register(checkpoints.AGGREGATE_TYPE)
