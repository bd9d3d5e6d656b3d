"""Configure the audit log, which also records what the admin changes in third-party models."""

from django.apps import AppConfig


class AuditConfig(AppConfig):
    """Configure the app."""

    name = "coordinator.audit"

    def ready(self) -> None:
        """Record the admin's own log entries."""
        from django.contrib.admin.models import LogEntry
        from django.db.models.signals import post_save

        from coordinator.audit.log import on_admin_change

        post_save.connect(on_admin_change, sender=LogEntry, dispatch_uid="audit admin change")
