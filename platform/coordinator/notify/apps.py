from django.apps import AppConfig


class Notify(AppConfig):
    name = "coordinator.notify"
    label = "notify"

    def ready(self) -> None:
        from coordinator.accounts.leaving import leaving
        from coordinator.mirrors import kinds
        from coordinator.notify.leaving import forget
        from coordinator.notify.shared import webhooks, wishes

        leaving.connect(forget, dispatch_uid="notify forget")
        kinds.register(webhooks.KIND, wishes.KIND)
