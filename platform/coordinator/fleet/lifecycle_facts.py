"""Gather what the site knows of a run, for the run lifecycle, which is pure."""

import statistics
import time
from datetime import datetime
from typing import Any

from barnraise.protocol.enums import Activity
from coordinator.fleet.models import Membership, is_alive
from coordinator.runs.lifecycle import LifecycleFacts
from coordinator.runs.models import Run

ACTIVITIES_WITH_LEDGER = (  # machines with these activities have the ledger
    Activity.TRAINING,
    Activity.PAUSED,
    Activity.FINISHING,
    Activity.FINISHED,
)
COLUMNS = (
    "machine",
    "machine__owner",
    "tokens",
    "final_checkpoint_at",
    "ledger_tokens",
    "activity",
    "last_seen",
    "last_report",
)


def gather_facts(run: Run) -> LifecycleFacts:
    """Gather the facts of a run's machines, at all mirrors.

    Another mirror's figures count as this site's own do: that mirror could sign what follows from
    them as well.
    """
    members = Membership.everywhere.filter(run=run, machine__revoked=None)
    rows = list(members.values(*COLUMNS))
    now = time.time()
    alive = [
        row
        for row in rows
        if is_alive(row["last_seen"].timestamp(), row["activity"], run.report_every, now)
    ]
    contributors = {row["machine__owner"] for row in rows if row["tokens"]}
    others = contributors - {run.owner_id}
    owners_with_final = {row["machine__owner"] for row in rows if row["final_checkpoint_at"]}
    return LifecycleFacts(
        launch_requested=run.launch_requested,
        manifest=run.manifest is not None,
        quorum=run.quorum,
        alive=len({row["machine"] for row in alive}),
        ledger_tokens=max(run.ledger_tokens, _ledger_tokens(alive)),
        token_budget=run.token_budget,
        owner_safe=not run.owner.is_active or run.owner_id in owners_with_final,
        others_safe=len(owners_with_final & others),
        others_ever=len(others),
    )


def _ledger_tokens(alive: list[dict[str, Any]]) -> int:
    """Return the median of the machines' ledgers: one machine that lies changes nothing."""
    newest: dict[Any, tuple[datetime, int]] = {}
    for row in alive:
        if row["activity"] in ACTIVITIES_WITH_LEDGER:
            report = row["last_report"], row["ledger_tokens"]
            newest[row["machine"]] = max(report, newest.get(row["machine"], report))
    return statistics.median_high(tokens for _, tokens in newest.values()) if newest else 0


def advance_run(run: Run) -> bool:
    """Bring the run's token count and status up to date; return whether the status changed."""
    facts = gather_facts(run)
    if facts.ledger_tokens > run.ledger_tokens:
        run.record_ledger_tokens(facts.ledger_tokens)
    return run.advance(facts)
