"""The Django app `web`."""

from django.apps import AppConfig


class WebConfig(AppConfig):
    """Register the app; it has no models."""

    name = "coordinator.web"
    label = "web"
