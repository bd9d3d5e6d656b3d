from django.apps import AppConfig


class Accounts(AppConfig):
    name = "coordinator.accounts"
    label = "accounts"
