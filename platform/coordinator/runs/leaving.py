"""What of a person's runs goes with them: drafts nobody else ever saw, what they wrote, where they were invited."""

from django.dispatch import receiver

from coordinator.accounts.leaving import leaving
from coordinator.audit.log import forget
from coordinator.runs.invitations import Guest, Invitation
from coordinator.runs.models import Run


@receiver(leaving)
def forget_drafts(sender, person, **rest) -> None:
    drafts = Run.objects.filter(owner=person, spec_text="")
    forget(*drafts)
    drafts.delete()
    Run.objects.filter(owner=person).update(notes="")
    Invitation.objects.filter(run__owner=person).update(note="")
    Guest.objects.filter(user=person).delete()
