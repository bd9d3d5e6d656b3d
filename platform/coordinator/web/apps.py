from django.apps import AppConfig


class Web(AppConfig):
    name = "coordinator.web"
    label = "web"
