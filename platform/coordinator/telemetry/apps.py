from django.apps import AppConfig


class Telemetry(AppConfig):
    name = "coordinator.telemetry"
    label = "telemetry"

    def ready(self) -> None:
        from coordinator.mirrors import kinds
        from coordinator.telemetry.shared import checkpoints, credits

        kinds.register(checkpoints.KIND, credits.KIND)
