"""The Django app `api`."""

from django.apps import AppConfig


class ApiConfig(AppConfig):
    """Register the app; it has no models."""

    name = "coordinator.api"
    label = "api"
