"""Configure the staff's pages."""

from django.apps import AppConfig


class StaffConfig(AppConfig):
    """Register the app."""

    name = "coordinator.staff"
    label = "staff"
