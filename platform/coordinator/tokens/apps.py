from django.apps import AppConfig


class TokensConfig(AppConfig):
    name = "coordinator.tokens"
    label = "tokens"

    def ready(self) -> None:
        from coordinator.accounts.deletion import leaving
        from coordinator.tokens.leaving import forget_tokens

        leaving.connect(forget_tokens, dispatch_uid="tokens forget")
