from django.apps import AppConfig


class Fleet(AppConfig):
    name = "coordinator.fleet"
    label = "fleet"

    def ready(self) -> None:
        from coordinator.fleet import leaving  # noqa: F401  (it listens)
