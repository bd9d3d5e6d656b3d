from django.apps import AppConfig


class Fleet(AppConfig):
    name = "coordinator.fleet"
    label = "fleet"

    def ready(self) -> None:
        from coordinator.accounts.leaving import leaving
        from coordinator.fleet.leaving import forget
        from coordinator.fleet.shared import rests, verdicts
        from coordinator.mirrors import kinds

        leaving.connect(forget, dispatch_uid="fleet forget")
        kinds.register(rests.KIND, verdicts.KIND)
