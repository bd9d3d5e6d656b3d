from django.apps import AppConfig


class StaffConfig(AppConfig):
    name = "coordinator.staff"
    label = "staff"

    def ready(self) -> None:
        from django.contrib.admin.models import LogEntry
        from django.db.models.signals import post_save

        from coordinator.audit.third_party import note

        post_save.connect(note, sender=LogEntry, dispatch_uid="staff note")
