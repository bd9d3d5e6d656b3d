from django.apps import AppConfig


class Accounts(AppConfig):
    name = "coordinator.accounts"
    label = "accounts"

    def ready(self) -> None:
        from coordinator.accounts import security

        security.listen()
