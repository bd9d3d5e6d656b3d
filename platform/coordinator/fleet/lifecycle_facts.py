"""What the site knows of a run, gathered for the lifecycle's pure `tick`."""

import statistics
import time
from datetime import datetime
from typing import Any

from barnraise.protocol.enums import Activity
from coordinator.fleet.models import Membership, is_alive
from coordinator.runs.lifecycle import LifecycleFacts
from coordinator.runs.models import Run

ACTIVITIES_WITH_LEDGER = (
    Activity.TRAINING,
    Activity.PAUSED,
    Activity.FINISHING,
    Activity.FINISHED,
)  # these have the ledger


def gather_facts(run: Run) -> LifecycleFacts:
    """Of its machines wherever they report: another mirror's word counts as ours does, for it could sign what follows
    from it as well."""
    members = Membership.everywhere.filter(run=run, machine__revoked=None)
    rows = list(members.values("machine", "machine__owner", "tokens", "safe", "ledger_tokens", "activity",
                               "last_seen", "heard"))  # fmt: skip
    now = time.time()
    alive = [
        row
        for row in rows
        if is_alive(row["last_seen"].timestamp(), row["activity"], run.report_every, now)
    ]
    others = {
        row["machine__owner"]
        for row in rows
        if row["machine__owner"] != run.owner_id and row["tokens"]
    }
    safe = {row["machine__owner"] for row in rows if row["safe"]}
    return LifecycleFacts(
        launch_requested=run.launch_requested,
        manifest=run.manifest is not None,
        quorum=run.quorum,
        alive=len({row["machine"] for row in alive}),
        ledger_tokens=max(run.ledger_tokens, _ledger(alive)),
        token_budget=run.token_budget,
        owner_safe=not run.owner.is_active or run.owner_id in safe,
        others_safe=len(safe & others),
        others_ever=len(others),
    )


def _ledger(alive: list[dict[str, Any]]) -> int:
    """Tokens in the ledger as most machines that work on it see it: one that lies moves nothing."""
    newest: dict[Any, tuple[datetime, int]] = {}
    for row in alive:
        if row["activity"] in ACTIVITIES_WITH_LEDGER:
            said = row["heard"], row["ledger_tokens"]
            newest[row["machine"]] = max(said, newest.get(row["machine"], said))
    return statistics.median_high(tokens for _, tokens in newest.values()) if newest else 0


def advance_run(run: Run) -> bool:
    """Brings the run's count of tokens and its status up to what is known. Whether the status changed."""
    known = gather_facts(run)
    if known.ledger_tokens > run.ledger_tokens:
        run.record_ledger_tokens(known.ledger_tokens)
    return run.advance(known)
