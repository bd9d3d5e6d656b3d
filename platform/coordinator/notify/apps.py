from django.apps import AppConfig


class Notify(AppConfig):
    name = "coordinator.notify"
    label = "notify"

    def ready(self) -> None:
        from coordinator.notify import leaving  # noqa: F401  (it listens)
        from coordinator.notify.shared import webhooks, wishes  # noqa: F401  (they register themselves)
