"""Where a person's machines could be reached, and what they are, is nobody's business once they have left."""

from coordinator.fleet.models import HardwareMeasurement, MachinePause, Membership


def forget(sender, person, **rest) -> None:
    Membership.objects.filter(machine__owner=person).update(addresses=[])
    HardwareMeasurement.objects.filter(machine__owner=person).delete()
    for resting in MachinePause.objects.filter(machine__owner=person).select_related("machine"):
        MachinePause.end(resting.machine)
