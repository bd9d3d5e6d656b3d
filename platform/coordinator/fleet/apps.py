from django.apps import AppConfig


class Fleet(AppConfig):
    name = "coordinator.fleet"
    label = "fleet"

    def ready(self) -> None:
        from coordinator.fleet import leaving  # noqa: F401  (it listens)
        from coordinator.fleet.shared import rests, verdicts  # noqa: F401  (they register themselves)
