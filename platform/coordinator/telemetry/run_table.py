"""A run as its page shows it right now: the run's own line and a row for each machine, live over stored numbers."""

import statistics
import time
from collections import Counter
from typing import Any

from django.db.models import FloatField, Func, TextField
from django.db.models.functions import Cast

from barnraise.protocol.enums import RunStatus
from coordinator.accounts.models import machine_name, shown_name
from coordinator.fleet.lifecycle_facts import ACTIVITIES_WITH_LEDGER, gather_facts
from coordinator.fleet.models import Membership, is_alive
from coordinator.runs import lifecycle
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue


class EpochSeconds(Func):
    """A time as seconds since 1970, which Postgres tells sooner than a date is parsed here."""

    template = "extract(epoch FROM %(expressions)s)::float8"
    output_field = FloatField()

    def get_db_converters(self, connection: object) -> list:
        """None: it comes as a float."""
        return []


# Columns of a membership, in one query without a model each: a run of thousands is looked at every second.
WHO = (Cast("pk", TextField()), "mirror", Cast("machine", TextField()), EpochSeconds("last_seen"), EpochSeconds("heard"),
       "latest", "machine__revoked", "machine__key", "machine__hostname", Cast("machine__owner", TextField()),
       "machine__owner__name", "machine__owner__left")  # fmt: skip
KEPT = ("activity", "version", "tokens", "ledger_tokens", "rate", "step", "updates_sent", "updates_received", "peers",
        "vector", "anchor", "plan", "step_seconds", "exchange")  # fmt: skip


def machine_rows(run: Run, now: float | None = None) -> list[dict[str, Any]]:
    """One row a machine, wherever it reports: id, name, person, activity, alive, last_seen, version, tokens, rate
    (tokens/s; 0 when gone), step, step_seconds, updates_sent, updates_received, peers, ledger_tokens, behind (tokens),
    plan and exchange (a `PlanView`, an `ExchangeView`, or None), agrees (see `agreement`, of this machine); and
    vector, anchor. Of what several mirrors know of a machine its newest report counts."""
    now = time.time() if now is None else now
    live = report_queue.live_rows(run.pk)
    members = _newest(run, live)
    pks = [
        pk
        for pk, mirror, machine, _, _, latest, *_ in members
        if mirror or not _is_whole(live.get(machine), latest)
    ]
    stored = _stored(pks) if pks else {}
    found = []
    for (
        pk,
        mirror,
        machine,
        last_seen,
        _,
        latest,
        revoked,
        key,
        hostname,
        owner,
        name,
        left,
    ) in members:
        row = {
            "id": machine,
            "name": machine_name(hostname, key),
            "person": shown_name(owner, name, left),
            "last_seen": last_seen,
            **stored.get(pk, {}),
        }
        newer = None if mirror else live.get(row["id"])
        if newer and newer["seq"] >= latest:
            row |= newer
            row["last_seen"] = max(last_seen, newer["last_seen"])
            del row["seq"]
        row["alive"] = revoked is None and is_alive(
            row["last_seen"], row["activity"], run.report_every, now
        )
        row["rate"] = row["rate"] if row["alive"] else 0.0
        found.append(row)
    ledger = max(run.ledger_tokens, _ledger(found))
    common = {vector: _commonest(anchors) for vector, anchors in _at_one_vector(found).items()}
    for row in found:
        row["behind"] = max(0, ledger - row["ledger_tokens"])
        compared = row["alive"] and row["anchor"] and row["vector"] in common
        row["agrees"] = row["anchor"] == common[row["vector"]] if compared else None
    return found


def _newest(run: Run, live: dict[str, dict[str, Any]]) -> list[tuple]:
    """Of each machine's rows (`WHO`) the one of the mirror that heard it report last, of two alike ours."""
    newest: dict[str, tuple[float, tuple]] = {}
    for row in Membership.everywhere.filter(run=run).order_by("joined", "mirror").values_list(*WHO):
        _, mirror, machine, _, heard, *_ = row
        told = live.get(machine, {}) if not mirror else {}
        at = max(heard, told.get("last_seen", 0.0))
        if (
            machine not in newest
            or at > newest[machine][0]
            or (at == newest[machine][0] and not mirror)
        ):
            newest[machine] = at, row
    return [row for _, row in newest.values()]


def _is_whole(row: dict[str, Any] | None, latest: int) -> bool:
    """Whether a live row says all that Postgres would, and nothing older."""
    return row is not None and row["seq"] >= latest and "plan" in row and "exchange" in row


def run_summary(run: Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The run's own line; `rows` as `workers` gave them. Times in seconds since 1970."""
    tokens, alive = max(run.ledger_tokens, _ledger(rows)), sum(row["alive"] for row in rows)
    goes_on = (
        run.state is RunStatus.TRAINING and alive and tokens < run.token_budget
    )  # what is waited for takes a query
    return {
        "id": str(run.pk),
        "name": run.name,
        "status": run.status,
        "tokens": tokens,
        "budget": run.token_budget,
        "rate": sum(row["rate"] for row in rows),
        "started": run.started.timestamp() if run.started else None,
        "updates": sum(row["updates_sent"] for row in rows),
        "workers_known": len(rows),
        "workers_alive": alive,
        "agree": weights_agree(rows),
        "waiting": None
        if goes_on
        else lifecycle.waiting_reason(run.state, gather_facts(run)) or None,
    }


def weights_agree(rows: list[dict[str, Any]]) -> bool | None:
    """Whether live machines that hold the same updates hold the same weights; None while no two can be compared."""
    comparable = _at_one_vector(rows).values()
    return all(len(set(anchors)) == 1 for anchors in comparable) if comparable else None


def _at_one_vector(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Version vector → the anchors of live machines at it, where two or more can be compared."""
    told = [(row["vector"], row["anchor"]) for row in rows if row["alive"] and row["anchor"]]
    many = Counter(vector for vector, _ in told)
    groups: dict[str, list[str]] = {}
    for vector, anchor in told:
        if many[vector] > 1:
            groups.setdefault(vector, []).append(anchor)
    return groups


def _commonest(anchors: list[str]) -> str | None:
    """The one that most have, which those who have it agree with; None where two are as common: of two machines that
    differ neither is right."""
    (anchor, most), *others = Counter(anchors).most_common(2)
    return None if others and others[0][1] == most else anchor


def _ledger(rows: list[dict[str, Any]]) -> int:
    """As most live machines that work on it see it."""
    known = [
        row["ledger_tokens"]
        for row in rows
        if row["alive"] and row["activity"] in ACTIVITIES_WITH_LEDGER
    ]
    return statistics.median_high(known) if known else 0


def _stored(pks: list[str]) -> dict[str, dict[str, Any]]:
    """Membership → its numbers as Postgres holds them."""
    rows = Membership.everywhere.filter(pk__in=pks).values("pk", *KEPT)
    return {str(row.pop("pk")): row | {"anchor": row["anchor"] or None} for row in rows}
