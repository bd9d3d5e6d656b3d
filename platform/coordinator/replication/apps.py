from django.apps import AppConfig
from django.db.models.signals import post_migrate


class Replication(AppConfig):
    name = "coordinator.replication"
    label = "replication"

    def ready(self) -> None:
        from coordinator.eventlog import origin, registry
        from coordinator.replication import leases, volunteer_salt

        registry.register(
            origin.AGGREGATE_TYPE, leases.AGGREGATE_TYPE, volunteer_salt.AGGREGATE_TYPE
        )
        post_migrate.connect(adopt, dispatch_uid="replication adopt")


def adopt(sender, **rest) -> None:
    """A site that is older than its log, or than a kind of events, tells what it holds; and what others told that the
    version before did not understand counts from now on."""
    if sender.label != "notify":  # the last that shares anything
        return
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    from coordinator.eventlog import ingest, writer

    executor = MigrationExecutor(connection)
    if not executor.migration_plan(
        executor.loader.graph.leaf_nodes()
    ):  # all tables are as this version knows them
        writer.record_existing_rows()
        ingest.project_pending()
