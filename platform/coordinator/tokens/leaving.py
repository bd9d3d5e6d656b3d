"""Who leaves leaves no key behind."""

from coordinator.audit.log import anonymise
from coordinator.tokens.models import Token


def forget_tokens(sender, person, **rest) -> None:
    tokens = Token.objects.filter(user=person)
    anonymise(*tokens)
    tokens.delete()
