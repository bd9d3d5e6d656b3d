from django.apps import AppConfig


class Runs(AppConfig):
    name = "coordinator.runs"
    label = "runs"

    def ready(self) -> None:
        from coordinator.accounts.leaving import leaving
        from coordinator.mirrors import kinds
        from coordinator.runs.leaving import forget
        from coordinator.runs.shared import runs

        leaving.connect(forget, dispatch_uid="runs forget")
        kinds.register(runs.KIND)
