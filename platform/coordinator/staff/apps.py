from django.apps import AppConfig


class Staff(AppConfig):
    name = "coordinator.staff"
    label = "staff"

    def ready(self) -> None:
        from django.contrib.admin.models import LogEntry
        from django.db.models.signals import post_save

        from coordinator.staff.foreign import note

        post_save.connect(note, sender=LogEntry, dispatch_uid="staff note")
