"""Where a person's machines could be reached, and what they are, is nobody's business once they have left."""

from coordinator.fleet.models import Measured, Membership, Rest


def forget(sender, person, **rest) -> None:
    Membership.objects.filter(machine__owner=person).update(addresses=[])
    Measured.objects.filter(machine__owner=person).delete()
    for resting in Rest.objects.filter(machine__owner=person).select_related("machine"):
        Rest.end(resting.machine)
