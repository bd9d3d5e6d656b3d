from django.apps import AppConfig


class WebConfig(AppConfig):
    name = "coordinator.web"
    label = "web"
