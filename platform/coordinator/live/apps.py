from django.apps import AppConfig


class LiveConfig(AppConfig):
    name = "coordinator.live"
    label = "live"
