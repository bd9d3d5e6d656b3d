from django.apps import AppConfig


class RunsConfig(AppConfig):
    name = "coordinator.runs"
    label = "runs"

    def ready(self) -> None:
        from coordinator.accounts.deletion import leaving
        from coordinator.eventlog import registry
        from coordinator.runs.leaving import forget
        from coordinator.runs.replicated import runs

        leaving.connect(forget, dispatch_uid="runs forget")
        registry.register(runs.AGGREGATE_TYPE)
