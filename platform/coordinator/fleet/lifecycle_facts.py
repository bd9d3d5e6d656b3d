"""Gather what the site knows of a run, for the run lifecycle, which is pure."""

import time
from collections import defaultdict
from typing import Any
from uuid import UUID

from barnraise.protocol.enums import Activity
from coordinator.fleet.models import NEVER, Membership, is_alive
from coordinator.fleet.people_count import RunCount, count_tokens
from coordinator.fleet.witnesses import vouched_people
from coordinator.runs.lifecycle import LifecycleFacts
from coordinator.runs.models import Run

ACTIVITIES_WITH_LEDGER = (  # machines with these activities have the ledger
    Activity.TRAINING,
    Activity.PAUSED,
    Activity.SUSPENDED,
    Activity.FINISHING,
    Activity.FINISHED,
)
COLUMNS = (
    "machine",
    "mirror",
    "machine__owner",
    "machine__confirmed",
    "tokens",
    "final_checkpoint_at",
    "ledger_tokens",
    "activity",
    "last_seen",
    "last_report",
    "ticket_expires",
    "report_interval",
)


def gather_facts(run: Run) -> LifecycleFacts:
    """Gather the facts of a run's machines, at all mirrors."""
    return _gather(run)[0]


def _gather(run: Run) -> tuple[LifecycleFacts, RunCount]:
    members = Membership.everywhere.filter(run=run, machine__revoked=None)
    rows = list(members.values(*COLUMNS))
    now = time.time()
    alive = [
        row
        for row in rows
        if is_alive(
            row["last_seen"].timestamp(),
            row["activity"],
            max(run.report_every, row["report_interval"]),
            now,
        )
    ]
    contributors = {row["machine__owner"] for row in rows if row["tokens"]}
    others = contributors - {run.owner_id}
    owners_with_final = {row["machine__owner"] for row in rows if row["final_checkpoint_at"]}
    signed = {person: figures.tokens for person, figures in vouched_people(run).items()}
    count = count_tokens(ledgers_by_person(alive), run.owner_id, signed)
    # Without a machine that reports, what was last vouched for stands.
    count = count or RunCount(run.ledger_tokens, run.ledger_people)
    owners = [row for row in alive if row["machine__owner"] == run.owner_id]
    facts = LifecycleFacts(
        launch_requested=run.launch_requested,
        manifest=run.manifest is not None,
        unconfirmed=bool(owners) and not any(row["machine__confirmed"] for row in owners),
        quorum=run.quorum,
        # A machine with neither a ticket nor a report has only prepared the text. Other mirrors
        # name only machines that report.
        alive=len(
            {
                row["machine"]
                for row in alive
                if row["mirror"] or row["ticket_expires"] or row["last_report"] > NEVER
            }
        ),
        ledger_tokens=count.tokens,
        token_budget=run.token_budget,
        owner_safe=not run.owner.is_active or run.owner_id in owners_with_final,
        others_safe=len(owners_with_final & others),
        others_ever=len(others),
    )
    return facts, count


def ledgers_by_person(alive: list[dict[str, Any]]) -> dict[UUID, list[int]]:
    """Return the tokens in each person's ledgers, one value for each machine.

    What a machine reports to this site counts before what other mirrors have of it. Of several
    other mirrors' figures the lowest counts, so that one mirror alone raises nobody's.
    """
    figures: dict[Any, tuple[bool, int, UUID]] = {}
    for row in alive:
        if row["activity"] in ACTIVITIES_WITH_LEDGER:
            figure = row["mirror"] != "", row["ledger_tokens"], row["machine__owner"]
            figures[row["machine"]] = min(figure, figures.get(row["machine"], figure))
    ledgers: dict[UUID, list[int]] = defaultdict(list)
    for _, tokens, person in figures.values():
        ledgers[person].append(tokens)
    return dict(ledgers)


def advance_run(run: Run) -> bool:
    """Bring the run's token count and status up to date; return whether the status changed.

    The count follows what people vouch for now, up and down.
    """
    facts, count = _gather(run)
    is_new = (count.tokens, count.people) != (run.ledger_tokens, run.ledger_people)
    if is_new and not run.is_over:
        run.record_ledger_tokens(count.tokens, count.people)
    return run.advance(facts)
