"""The Django app `credit`."""

from typing import Any

from django.apps import AppConfig


class CreditConfig(AppConfig):
    """Credit for tokens that other people's machines have confirmed."""

    name = "coordinator.credit"

    def ready(self) -> None:
        """Register the replicated type, and count attestations when reports are stored."""
        from coordinator.credit.replicated import credits as replicated_credits
        from coordinator.eventlog import registry
        from coordinator.telemetry.rollup import attestations_received

        registry.register(replicated_credits.AGGREGATE_TYPE)
        attestations_received.connect(_count_attestations, dispatch_uid="credit attestations")


def _count_attestations(sender: Any, attestations: Any, changed: Any, **kwargs: Any) -> None:
    from coordinator.credit.attestations import record_attestations

    record_attestations(attestations, changed)
