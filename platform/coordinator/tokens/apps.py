"""Configure personal tokens, and what happens to them when an account is deleted."""

from typing import Any

from django.apps import AppConfig


class TokensConfig(AppConfig):
    """Configure the app."""

    name = "coordinator.tokens"

    def ready(self) -> None:
        """Register the receiver of deleted accounts."""
        from coordinator.accounts.signals import account_deleted

        account_deleted.connect(on_account_deleted, dispatch_uid="tokens account_deleted")


def on_account_deleted(sender: type, person: Any, **kwargs: Any) -> None:
    """Delete the person's tokens."""
    from coordinator.audit.log import anonymise
    from coordinator.tokens.models import Token

    tokens = Token.objects.filter(user=person)
    anonymise(*tokens)
    tokens.delete()
