from django.apps import AppConfig


class Fleet(AppConfig):
    name = "coordinator.fleet"
    label = "fleet"
