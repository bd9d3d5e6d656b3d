"""Configure runs: their aggregate type, and what happens when an account is deleted."""

import re
from typing import Any
from urllib.parse import unquote

from django.apps import AppConfig


class RunsConfig(AppConfig):
    """Configure the app."""

    name = "coordinator.runs"

    def ready(self) -> None:
        """Register the aggregate type and the receiver of deleted accounts."""
        from coordinator.accounts.sign_up import invitation_checks
        from coordinator.accounts.signals import account_deleted
        from coordinator.eventlog import registry
        from coordinator.runs.replicated import published_texts, runs

        registry.register(runs.AGGREGATE_TYPE, published_texts.AGGREGATE_TYPE)
        if is_run_invitation not in invitation_checks:
            invitation_checks.append(is_run_invitation)
        account_deleted.connect(on_account_deleted, dispatch_uid="runs account_deleted")


def is_run_invitation(path: str) -> bool:
    """Return whether a path of this site is a valid invitation to a run."""
    from coordinator.runs.models import RunInvitation

    match = re.fullmatch(r"/runs/[0-9A-Za-z_-]+/invited/([^/]+)/?", path)
    return match is not None and RunInvitation.find_by_token(unquote(match[1])) is not None


def on_account_deleted(sender: type, person: Any, **kwargs: Any) -> None:
    """Delete the person's unlaunched drafts, published texts, notes and invitations.

    Invitations are for people who are named in the note. Those who joined by one remain in the run.
    """
    from coordinator.audit import log
    from coordinator.eventlog import writer
    from coordinator.runs.models import Guest, PublishedText, Run, RunInvitation

    PublishedText.delete_all_of(person)
    drafts = Run.objects.filter(owner=person, spec_text="")
    log.anonymise(*drafts)
    draft_ids = [draft.pk for draft in drafts]
    drafts.delete()
    for draft_id in draft_ids:
        writer.record("run.delete", draft_id, {})
    Run.objects.filter(owner=person).update(notes="")
    Guest.objects.filter(user=person).delete()
    RunInvitation.objects.filter(run__owner=person).delete()
