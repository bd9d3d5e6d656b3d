"""Where a person's machines could be reached, and what they could do, is nobody's business once they have left."""

from django.dispatch import receiver

from coordinator.accounts.leaving import leaving
from coordinator.fleet.machines import Measured, Rest
from coordinator.fleet.models import Membership


@receiver(leaving)
def forget_addresses(sender, person, **rest) -> None:
    Membership.objects.filter(machine__owner=person).update(addresses=[])
    Measured.objects.filter(machine__owner=person).delete()
    Rest.objects.filter(machine__owner=person).delete()
