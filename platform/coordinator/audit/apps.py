from django.apps import AppConfig


class Audit(AppConfig):
    name = "coordinator.audit"
    label = "audit"
