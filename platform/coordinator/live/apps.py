"""The Django app `live`."""

from django.apps import AppConfig


class LiveConfig(AppConfig):
    """Register the app; it has no models."""

    name = "coordinator.live"
    label = "live"
