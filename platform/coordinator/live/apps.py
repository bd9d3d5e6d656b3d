from django.apps import AppConfig


class Live(AppConfig):
    name = "coordinator.live"
    label = "live"
