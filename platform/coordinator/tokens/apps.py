from django.apps import AppConfig


class Tokens(AppConfig):
    name = "coordinator.tokens"
    label = "tokens"

    def ready(self) -> None:
        from coordinator.tokens import leaving  # noqa: F401  (it listens)
