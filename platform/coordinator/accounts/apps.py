"""The Django app `accounts`."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """People, their teams and their machines."""

    name = "coordinator.accounts"

    def ready(self) -> None:
        """Register the replicated types and connect signals."""
        from coordinator.accounts import auth_audit
        from coordinator.accounts import credential_sync as opening
        from coordinator.accounts.replicated import credentials, machines, people, teams
        from coordinator.eventlog import registry

        registry.register(
            people.AGGREGATE_TYPE,
            credentials.AGGREGATE_TYPE,
            machines.AGGREGATE_TYPE,
            teams.AGGREGATE_TYPE,
        )
        auth_audit.connect_signals()
        opening.connect_signals()
