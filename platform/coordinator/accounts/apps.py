from django.apps import AppConfig


class Accounts(AppConfig):
    name = "coordinator.accounts"
    label = "accounts"

    def ready(self) -> None:
        from coordinator.accounts import access as opening
        from coordinator.accounts import security
        from coordinator.accounts.shared import access, machines, people, teams  # noqa: F401  (they register themselves)

        security.listen()
        opening.listen()
