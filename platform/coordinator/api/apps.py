from django.apps import AppConfig


class ApiConfig(AppConfig):
    name = "coordinator.api"
    label = "api"
