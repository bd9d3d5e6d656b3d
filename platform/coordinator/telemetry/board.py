"""A run as its page shows it right now: the run's own line and a row for each machine, live over stored numbers."""

import statistics
import time
from typing import Any
from uuid import UUID

from coordinator.accounts.models import machine_name, shown_name
from coordinator.fleet.facts import KNOWING, facts
from coordinator.fleet.models import Membership, is_alive
from coordinator.runs import lifecycle
from coordinator.runs.models import Run
from coordinator.telemetry import stream

# Columns of a membership, in one query without a model each: a run of thousands is looked at every second.
WHO = ("pk", "mirror", "machine", "last_seen", "heard", "latest", "machine__revoked", "machine__key",
       "machine__hostname", "machine__owner", "machine__owner__name", "machine__owner__left")  # fmt: skip
KEPT = ("activity", "version", "tokens", "ledger_tokens", "rate", "step", "updates_sent", "updates_received", "peers",
        "vector", "anchor", "plan", "step_seconds", "trade")  # fmt: skip


def workers(run: Run, now: float | None = None) -> list[dict[str, Any]]:
    """One row a machine, wherever it reports: id, name, person, activity, alive, last_seen, version, tokens, rate
    (tokens/s; 0 when gone), step, step_seconds, updates_sent, updates_received, peers, ledger_tokens, behind (tokens),
    plan and trade (a `wire.PlanView`, a `wire.TradeView`, or None), agrees (see `agreement`, of this machine); and
    vector, anchor. Of what several mirrors know of a machine its newest report counts."""
    now = time.time() if now is None else now
    live = stream.rows(run.pk)
    members = _newest(run, live)
    pks = [
        pk
        for pk, mirror, machine, _, _, latest, *_ in members
        if mirror or not _is_whole(live.get(str(machine)), latest)
    ]
    stored = _stored(pks) if pks else {}
    found = []
    for pk, mirror, machine, last_seen, _, latest, revoked, key, hostname, owner, name, left in members:
        row = {
            "id": str(machine),
            "name": machine_name(hostname, key),
            "person": shown_name(owner, name, left),
            "last_seen": last_seen.timestamp(),
            **stored.get(pk, {}),
        }
        newer = None if mirror else live.get(row["id"])
        if newer and newer["seq"] >= latest:
            row |= {k: v for k, v in newer.items() if k != "seq" and not (k == "last_seen" and v < row[k])}
        row["alive"] = revoked is None and is_alive(row["last_seen"], row["activity"], run.report_every, now)
        row["rate"] = row["rate"] if row["alive"] else 0.0
        found.append(row)
    ledger = max(run.ledger_tokens, _ledger(found))
    groups = _at_one_vector(found)
    for row in found:
        row["behind"] = max(0, ledger - row["ledger_tokens"])
        row["agrees"] = _agrees(row, groups.get(row["vector"], []))
    return found


def _newest(run: Run, live: dict[str, dict[str, Any]]) -> list[tuple]:
    """Of each machine's rows (`WHO`) the one of the mirror that heard it report last, of two alike ours."""
    newest: dict[UUID, tuple[float, tuple]] = {}
    for row in Membership.everywhere.filter(run=run).order_by("joined", "mirror").values_list(*WHO):
        _, mirror, machine, _, heard, *_ = row
        told = live.get(str(machine), {}) if not mirror else {}
        at = max(heard.timestamp(), told.get("last_seen", 0.0))
        if machine not in newest or at > newest[machine][0] or (at == newest[machine][0] and not mirror):
            newest[machine] = at, row
    return [row for _, row in newest.values()]


def _is_whole(row: dict[str, Any] | None, latest: int) -> bool:
    """Whether a live row says all that Postgres would, and nothing older."""
    return row is not None and row["seq"] >= latest and "plan" in row and "trade" in row


def summary(run: Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The run's own line; `rows` as `workers` gave them. Times in seconds since 1970."""
    known = facts(run)
    return {
        "id": str(run.pk),
        "name": run.name,
        "status": run.status,
        "tokens": max(known.ledger_tokens, _ledger(rows)),
        "budget": known.token_budget,
        "rate": sum(row["rate"] for row in rows),
        "started": run.started.timestamp() if run.started else None,
        "updates": sum(row["updates_sent"] for row in rows),
        "workers_known": len(rows),
        "workers_alive": sum(row["alive"] for row in rows),
        "agree": agreement(rows),
        "waiting": lifecycle.waiting(run.state, known) or None,
    }


def agreement(rows: list[dict[str, Any]]) -> bool | None:
    """Whether live machines that hold the same updates hold the same weights; None while no two can be compared."""
    comparable = [anchors for anchors in _at_one_vector(rows).values() if len(anchors) > 1]
    return all(len(set(anchors)) == 1 for anchors in comparable) if comparable else None


def _at_one_vector(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Version vector → the anchors of live machines at it."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["alive"] and row["anchor"]:
            groups.setdefault(row["vector"], []).append(row["anchor"])
    return groups


def _agrees(row: dict[str, Any], anchors: list[str]) -> bool | None:
    """Whether this machine's anchor is the one that most at its vector have; of two that differ neither does."""
    if not row["alive"] or not row["anchor"] or len(anchors) < 2:
        return None
    mine = anchors.count(row["anchor"])
    return mine > max((anchors.count(other) for other in anchors if other != row["anchor"]), default=0)


def _ledger(rows: list[dict[str, Any]]) -> int:
    """As most live machines that work on it see it."""
    known = [row["ledger_tokens"] for row in rows if row["alive"] and row["activity"] in KNOWING]
    return statistics.median_high(known) if known else 0


def _stored(pks: list[UUID]) -> dict[UUID, dict[str, Any]]:
    """Membership → its numbers as Postgres holds them."""
    rows = Membership.everywhere.filter(pk__in=pks).values("pk", *KEPT)
    return {row.pop("pk"): row | {"anchor": row["anchor"] or None} for row in rows}
