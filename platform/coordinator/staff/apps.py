from django.apps import AppConfig


class Staff(AppConfig):
    name = "coordinator.staff"
    label = "staff"
