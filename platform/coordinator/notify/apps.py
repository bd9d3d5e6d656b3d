from django.apps import AppConfig


class NotifyConfig(AppConfig):
    name = "coordinator.notify"
    label = "notify"

    def ready(self) -> None:
        from coordinator.accounts.deletion import leaving
        from coordinator.eventlog import registry
        from coordinator.notify.leaving import forget
        from coordinator.notify.replicated import preferences, webhooks

        leaving.connect(forget, dispatch_uid="notify forget")
        registry.register(webhooks.AGGREGATE_TYPE, preferences.AGGREGATE_TYPE)
