"""Where a person's machines could be reached is nobody's business once they have left."""

from django.dispatch import receiver

from coordinator.accounts.leaving import leaving
from coordinator.fleet.models import Membership


@receiver(leaving)
def forget_addresses(sender, person, **rest) -> None:
    Membership.objects.filter(machine__owner=person).update(addresses=[])
