from django.apps import AppConfig


class Accounts(AppConfig):
    name = "coordinator.accounts"
    label = "accounts"

    def ready(self) -> None:
        from coordinator.accounts import access as opening
        from coordinator.accounts import security
        from coordinator.accounts.shared import access, machines, people, teams
        from coordinator.mirrors import kinds

        kinds.register(people.KIND, access.KIND, machines.KIND, teams.KIND)
        security.listen()
        opening.listen()
