"""What the site knows of a run, gathered for the lifecycle's pure `tick`."""

import statistics

from barnraise.wire import Activity
from coordinator.fleet.models import Membership
from coordinator.runs.lifecycle import Facts
from coordinator.runs.models import Run

KNOWING = (Activity.TRAINING, Activity.PAUSED, Activity.FINISHING, Activity.FINISHED)  # these have the ledger


def facts(run: Run) -> Facts:
    members = Membership.objects.filter(run=run, machine__revoked=None)
    rows = list(members.values_list("machine__owner", "tokens", "safe"))
    others = {owner for owner, tokens, _ in rows if owner != run.owner_id and tokens}
    return Facts(
        launch_requested=run.launch_requested,
        manifest=run.manifest is not None,
        quorum=run.quorum,
        alive=Membership.objects.alive_in(run).count(),
        ledger_tokens=max(run.ledger_tokens, ledger(run)),
        token_budget=run.token_budget,
        owner_safe=not run.owner.is_active or any(owner == run.owner_id and safe for owner, _, safe in rows),
        others_safe=len({owner for owner, _, safe in rows if owner in others and safe}),
        others_ever=len(others),
    )


def ledger(run: Run) -> int:
    """Tokens in the ledger as most machines that work on it see it: one that lies moves nothing."""
    known = Membership.objects.alive_in(run).filter(activity__in=KNOWING).values_list("ledger_tokens", flat=True)
    return statistics.median_high(known) if known else 0


def advance(run: Run) -> bool:
    """Brings the run's count of tokens and its status up to what is known. Whether the status changed."""
    known = facts(run)
    if known.ledger_tokens > run.ledger_tokens:
        run.note_ledger(known.ledger_tokens)
    return run.advance(known)
