from django.apps import AppConfig


class Api(AppConfig):
    name = "coordinator.api"
    label = "api"
