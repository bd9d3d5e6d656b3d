from django.apps import AppConfig


class Credit(AppConfig):
    name = "coordinator.credit"
    label = "credit"

    def ready(self) -> None:
        from coordinator.credit.replicated import credits
        from coordinator.eventlog import registry

        registry.register(credits.AGGREGATE_TYPE)
