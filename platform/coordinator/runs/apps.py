from django.apps import AppConfig


class Runs(AppConfig):
    name = "coordinator.runs"
    label = "runs"
