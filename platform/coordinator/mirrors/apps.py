from django.apps import AppConfig
from django.db.models.signals import post_migrate


class Mirrors(AppConfig):
    name = "coordinator.mirrors"
    label = "mirrors"

    def ready(self) -> None:
        from coordinator.mirrors import duties, kinds, origins, salt

        kinds.register(origins.KIND, duties.KIND, salt.KIND)
        post_migrate.connect(adopt, dispatch_uid="mirrors adopt")


def adopt(sender, **rest) -> None:
    """A site that is older than its log, or than a kind of events, tells what it holds; and what others told that the
    version before did not understand counts from now on."""
    if sender.label != "notify":  # the last that shares anything
        return
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    from coordinator.mirrors import log, receiving

    executor = MigrationExecutor(connection)
    if not executor.migration_plan(
        executor.loader.graph.leaf_nodes()
    ):  # all tables are as this version knows them
        log.adopt()
        receiving.settle()
