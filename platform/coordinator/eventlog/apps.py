from django.apps import AppConfig


class EventLog(AppConfig):
    name = "coordinator.eventlog"
    label = "eventlog"
