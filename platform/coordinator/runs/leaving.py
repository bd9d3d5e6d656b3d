"""What goes with a person: the drafts nobody else ever saw, what they wrote, and whose guest they were."""

from coordinator.audit import log as audit
from coordinator.eventlog import writer as mirrors
from coordinator.runs.models import Guest, Run, RunInvitation


def forget(sender, person, **rest) -> None:
    drafts = Run.objects.filter(owner=person, spec_text="")
    audit.anonymise(*drafts)
    gone = [draft.pk for draft in drafts]
    drafts.delete()
    for pk in gone:
        mirrors.record("run.forget", pk, {})
    Run.objects.filter(owner=person).update(notes="")
    Guest.objects.filter(user=person).delete()
    RunInvitation.objects.filter(
        run__owner=person
    ).delete()  # whom they are for is in their notes; who came by them stays
