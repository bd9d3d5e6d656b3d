"""Configure the event log: its own aggregate type, and the catch-up after a migration."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_migrate


class EventLogConfig(AppConfig):
    """Configure the app."""

    name = "coordinator.eventlog"

    def ready(self) -> None:
        """Register the aggregate type "origin", guard migrations and catch up after them."""
        from coordinator.eventlog import registry, writer
        from coordinator.eventlog.database_owner import find_owner_key
        from coordinator.lib import site_identity
        from coordinator.lib.schema_comparison import refuse_other_schema

        site_identity.register_key_lookup(find_owner_key)
        registry.register(writer.ORIGIN)
        pre_migrate.connect(refuse_other_schema, sender=self, dispatch_uid="same schema")
        post_migrate.connect(catch_up, sender=self, dispatch_uid="eventlog catch up")


def catch_up(sender: AppConfig, **kwargs: Any) -> None:
    """Record rows that no event describes, and project events that are understood since now.

    A site may be older than its log or than an aggregate type, and other mirrors may have sent
    events that the version before did not understand.
    """
    from coordinator.eventlog import ingest, writer
    from coordinator.lib.schema_comparison import DatabaseSchema

    if DatabaseSchema().count_missing_migrations():
        return  # some tables do not have the columns of this version yet
    writer.record_existing_rows()
    ingest.project_pending()
