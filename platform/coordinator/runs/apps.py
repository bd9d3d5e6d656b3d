from django.apps import AppConfig


class Runs(AppConfig):
    name = "coordinator.runs"
    label = "runs"

    def ready(self) -> None:
        from coordinator.runs import leaving  # noqa: F401  (it listens)
        from coordinator.runs.shared import runs  # noqa: F401  (it registers itself)
