from django.apps import AppConfig


class Telemetry(AppConfig):
    name = "coordinator.telemetry"
    label = "telemetry"
