from django.apps import AppConfig


class Mirrors(AppConfig):
    name = "coordinator.mirrors"
    label = "mirrors"

    def ready(self) -> None:
        from coordinator.mirrors import origins  # noqa: F401  (it registers itself)
