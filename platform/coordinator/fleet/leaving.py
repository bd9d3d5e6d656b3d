"""Where a person's machines could be reached, and what they are, is nobody's business once they have left."""

from django.dispatch import receiver

from coordinator.accounts.leaving import leaving
from coordinator.fleet.models import Measured, Membership, Rest


@receiver(leaving)
def forget(sender, person, **rest) -> None:
    Membership.objects.filter(machine__owner=person).update(addresses=[])
    Measured.objects.filter(machine__owner=person).delete()
    for rest in Rest.objects.filter(machine__owner=person).select_related("machine"):
        Rest.end(rest.machine)
