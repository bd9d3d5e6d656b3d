from django.apps import AppConfig


class FleetConfig(AppConfig):
    name = "coordinator.fleet"
    label = "fleet"

    def ready(self) -> None:
        from coordinator.accounts.deletion import leaving
        from coordinator.eventlog import registry
        from coordinator.fleet.leaving import forget
        from coordinator.fleet.replicated import machine_pauses, verdicts

        leaving.connect(forget, dispatch_uid="fleet forget")
        registry.register(machine_pauses.AGGREGATE_TYPE, verdicts.AGGREGATE_TYPE)
