from django.apps import AppConfig


class Staff(AppConfig):
    name = "coordinator.staff"
    label = "staff"

    def ready(self) -> None:
        from coordinator.staff import foreign  # noqa: F401  (it listens)
