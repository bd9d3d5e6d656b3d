from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    name = "coordinator.telemetry"
    label = "telemetry"

    def ready(self) -> None:
        from coordinator.eventlog import registry
        from coordinator.telemetry.replicated import checkpoints

        registry.register(checkpoints.AGGREGATE_TYPE)
