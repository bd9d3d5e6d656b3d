"""Who leaves leaves no key behind."""

from django.dispatch import receiver

from coordinator.accounts.leaving import leaving
from coordinator.audit.log import forget
from coordinator.tokens.models import Token


@receiver(leaving)
def forget_tokens(sender, person, **rest) -> None:
    tokens = Token.objects.filter(user=person)
    forget(*tokens)
    tokens.delete()
