from django.apps import AppConfig


class Telemetry(AppConfig):
    name = "coordinator.telemetry"
    label = "telemetry"

    def ready(self) -> None:
        from coordinator.telemetry.shared import checkpoints, credits  # noqa: F401  (they register themselves)
