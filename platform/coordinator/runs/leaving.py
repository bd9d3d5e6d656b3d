"""What of a person's runs goes with them: the drafts that nobody else ever saw."""

from django.dispatch import receiver

from coordinator.accounts.leaving import leaving
from coordinator.runs.models import Run


@receiver(leaving)
def forget_drafts(sender, person, **rest) -> None:
    Run.objects.filter(owner=person, spec_text="").delete()
