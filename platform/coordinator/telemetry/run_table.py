"""Build the table of a run's page from live and stored figures."""

import time
from collections import Counter, defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from django.db.models import FloatField, Func, TextField
from django.db.models.functions import Cast

from barnraise.protocol.enums import Activity, RunStatus
from coordinator.accounts.models import Machine, machine_name, marked_name, shown_name
from coordinator.fleet.lifecycle_facts import ACTIVITIES_WITH_LEDGER, gather_facts
from coordinator.fleet.models import FIGURE_COLUMNS, Membership, complete_figures, is_alive
from coordinator.fleet.people_count import (
    MAX_REPORTED_RATIO,
    RunCount,
    count_tokens,
    sum_over_people,
)
from coordinator.fleet.token_limits import volunteer_rate
from coordinator.fleet.witnesses import vouched_people
from coordinator.lib import heartbeats
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs import lifecycle
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue
from coordinator.telemetry.checkpoint_votes import PEOPLE_NEEDED, count_votes
from coordinator.telemetry.checkpoints import list_checkpoint_rows
from coordinator.telemetry.run_cards import load_losses
from coordinator.telemetry.run_state import StateFacts, describe_state
from coordinator.telemetry.task_scores import last_share

FINAL_CHECKPOINTS = 4  # the newest; the first that anybody reports is the final one
TAKES_NO_STEPS = (Activity.PAUSED, Activity.SUSPENDED)
# By run: how many people confirm the final weights.
_confirmations: TtlCache[object, int] = TtlCache(10.0)


class EpochSeconds(Func):
    """A time as seconds since 1970, which Postgres computes faster than Python parses a date."""

    template = "extract(epoch FROM %(expressions)s)::float8"
    output_field: Any = FloatField()

    def get_db_converters(self, connection: object) -> list:
        """Return no converters: the value is a float."""
        return []


# Columns of a membership, read by one query without model instances: a run of thousands is read
# every second.
COLUMNS = (
    Cast("pk", TextField()),
    "mirror",
    Cast("machine", TextField()),
    EpochSeconds("last_seen"),
    EpochSeconds("last_report"),
    "ticket_expires",
    "report_interval",
    "latest",
    "machine__revoked",
    "machine__key",
    "machine__hostname",
    Cast("machine__owner", TextField()),
    "machine__owner__name",
    "machine__owner__left",
)


def machine_rows(run: Run, now: float | None = None) -> list[dict[str, Any]]:
    """Build one row for each machine, wherever it reports; `now` is in seconds since 1970.

    If several mirrors have figures of a machine, those of its newest report count.

    Returns:
        Rows with id, name, key, person, owner (the person's id), mirror (the key of the mirror
        whose figures these are; "" for this site), alive, counts (`counted_rows`), last_seen,
        agrees (`weights_agree`, of this machine) and all of `MachineFigures`; the rate of a machine
        that is gone is 0. Each seat of a crew has the name of its machine.
    """
    now = time.time() if now is None else now
    live = report_queue.live_rows(run.pk)
    members = _select_newest(run, live)
    pks = [
        pk
        for pk, mirror, machine, _, _, _, _, latest, *_ in members
        if mirror or not _is_whole(live.get(machine), latest)
    ]
    stored = _load_figures(pks) if pks else {}
    machines = []
    for (
        pk,
        mirror,
        machine,
        last_seen,
        last_report,
        ticket,
        interval,
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
            "key": key,
            "person": shown_name(owner, name, left),
            "owner": owner,
            "mirror": mirror,
            "last_seen": last_seen,
            **stored.get(pk, {}),
        }
        newer = None if mirror else live.get(row["id"])
        if newer and newer["seq"] >= latest:
            row |= newer
            row["last_seen"] = max(last_seen, newer["last_seen"])
            interval = row.pop("report_interval", 0.0)
            del row["seq"]
            row.pop("links", None)  # for the graph of the swarm alone
        row["alive"] = revoked is None and is_alive(
            row["last_seen"], row["activity"], max(run.report_every, interval), now
        )
        row["rate"] = row["rate"] if row["alive"] else 0.0
        # One with neither a ticket nor a report has only prepared the text. Other mirrors name only
        # machines that report.
        may_train = bool(mirror or ticket or newer or last_report > 0)
        row["counts"] = bool(row["tokens"] or (row["alive"] and may_train))
        if row["activity"] != Activity.FETCHING or row["tokens"]:
            machines.append(row)  # and not a machine that has downloaded the weights alone
    common = {
        vector: _find_commonest_anchor(reports)
        for vector, reports in _at_one_vector(machines).items()
    }
    for row in machines:
        compared = row["alive"] and row["anchor"] and row["vector"] in common
        row["agrees"] = row["anchor"] == common[row["vector"]] if compared else None
    _mark_twins(machines)
    _name_crews(machines, {key[:16]: machine_name(host, key) for *_, key, host, _, _, _ in members})
    return machines


def _name_crews(rows: list[dict[str, Any]], names: dict[str, str]) -> None:
    """Set the name of each machine of a crew, which its lead reports by the start of its key."""
    for row in rows:
        row["crew"] = [
            {name: value for name, value in seat.items() if name != "key"}
            | {"name": names.get(seat["key"], seat["key"][:8])}
            for seat in row.get("crew", ())
        ]


def counted_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of machines that have trained, or that are here to train."""
    return [row for row in rows if row["counts"]]


def _mark_twins(rows: list[dict[str, Any]]) -> None:
    """Set the start of its key behind the name of each machine whose owner has two of that name."""
    names = Counter((row["owner"], row["name"]) for row in rows)
    for row in rows:
        if names[row["owner"], row["name"]] > 1:
            row["name"] = marked_name(row["name"], row["key"])


def _select_newest(run: Run, live: dict[str, dict[str, Any]]) -> list[tuple]:
    """Select each machine's row with the latest report; of two alike this site's own."""
    newest: dict[str, tuple[float, tuple]] = {}
    for row in (
        Membership.everywhere.filter(run=run).order_by("joined", "mirror").values_list(*COLUMNS)
    ):
        _, mirror, machine, _, last_report, *_ = row
        live_row = live.get(machine, {}) if not mirror else {}
        at = max(last_report, live_row.get("last_seen", 0.0))
        if (
            machine not in newest
            or at > newest[machine][0]
            or (at == newest[machine][0] and not mirror)
        ):
            newest[machine] = at, row
    return [row for _, row in newest.values()]


def _is_whole(row: dict[str, Any] | None, latest: int) -> bool:
    """Return whether a live row has everything that Postgres has, and nothing older."""
    return row is not None and row["seq"] >= latest and "plan" in row and "exchange" in row


def run_summary(run: Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the run's own line from `machine_rows`. Times are in seconds since 1970."""
    counted = counted_rows(rows)
    alive = sum(row["alive"] for row in counted)
    owner = str(run.owner_id)
    has_others = any(row["owner"] != owner for row in rows)
    vouched = vouched_people(run) if has_others else {}
    speeds = {str(pk): MAX_REPORTED_RATIO * figures.speed for pk, figures in vouched.items()}
    signed = {str(pk): figures.tokens for pk, figures in vouched.items()}
    updates = {str(pk): MAX_REPORTED_RATIO * figures.updates for pk, figures in vouched.items()}
    count = _live_count(run, rows, signed)
    tokens = count.tokens
    # Only a run that does not train on needs the query for what it waits for.
    is_training = run.state is RunStatus.TRAINING and alive and tokens < run.token_budget
    waiting = text_waiting_reason(run, rows) or None
    if not waiting and not is_training:
        waiting = lifecycle.waiting_reason(run.state, gather_facts(run)) or None
    losses = load_losses([run])[run.pk]
    figures = {
        "id": str(run.pk),
        "name": run.name,
        "status": run.status,
        "tokens": tokens,
        "budget": run.token_budget,
        "people": count.people,
        "rate": sum_over_people(_sum_speeds(run, rows), owner, speeds),
        "started": run.started.timestamp() if run.started else None,
        "ended": run.finished.timestamp() if run.finished else None,
        "updates": round(sum_over_people(_sum_by_person(rows, "updates_sent"), owner, updates)),
        "workers_known": len(counted),
        "people_known": len({row["owner"] for row in counted}),
        "workers_alive": alive,
        "training_loss": losses.training,
        "validation_loss": losses.validation,
        "score": last_share(run),
        "confirmed_by": _count_confirmations(run) if run.state is RunStatus.FINISHED else 0,
        "agree": weights_agree(rows),
        "waiting": waiting,
        "delayed_since": heartbeats.delayed_since(),
    }
    paused = sum(row["alive"] and row["activity"] in TAKES_NO_STEPS for row in counted)
    state = describe_state(replace(state_facts(figures), paused=paused))
    return figures | {
        "tiles": list(state.tiles),
        "cards": list(state.cards),
        "notice": state.notice,
        "is_live": state.is_live,
    }


def state_facts(figures: dict[str, Any], has_model: bool = False) -> StateFacts:
    """Return what the description of a run's state follows from, by its own line."""
    return StateFacts(
        status=RunStatus(figures["status"]),
        tokens=figures["tokens"],
        budget=figures["budget"],
        rate=figures["rate"],
        has_loss=figures["training_loss"] is not None or figures["validation_loss"] is not None,
        has_score=figures["score"] is not None,
        confirmed_by=figures["confirmed_by"],
        updates=figures["updates"],
        alive=figures["workers_alive"],
        has_model=has_model,
    )


def _count_confirmations(run: Run) -> int:
    """Count the people who confirm the final weights of a run that is finished."""

    def count() -> int:
        rows = list_checkpoint_rows(run, FINAL_CHECKPOINTS)
        final = next((row for row in rows if row.people), None)
        return final.people if final is not None and final.confirmed else 0

    return _confirmations.get(run.pk, count)


def text_waiting_reason(run: Run, rows: list[dict[str, Any]]) -> str:
    """Return for which machine's text the others wait; "" if a machine that reports has it."""
    activities = {row["activity"] for row in rows if row["alive"]}
    has_text = activities & set(ACTIVITIES_WITH_LEDGER)
    if run.is_over or run.manifest is None or has_text or Activity.PREPARING not in activities:
        return ""
    holder = Machine.objects.filter(key=run.manifest["key"]).first()
    if holder is None:
        return "Waiting for the text: the machine that prepared it is not enrolled any longer."
    row = next((row for row in rows if row["id"] == str(holder.pk)), None)
    if row is not None and row["alive"]:
        return ""  # it sends the text now
    since = ""
    if row is not None:
        at = datetime.fromtimestamp(row["last_seen"], UTC)
        since = f" since {at:%H:%M} UTC on {at.day} {at:%B}"
    return (
        f"Waiting for the text: {holder.name} prepared it and has not reported{since}. "
        "Training starts when it is back."
    )


def sum_traffic(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Sum what machines that report exchange now.

    Returns:
        "machines" (that report), "sent" and "received" (bytes/s), and "staleness": the mean of the
        updates that their peers have and they lack.
    """
    alive = [row for row in rows if row["alive"]]
    exchanges = [row["exchange"] for row in alive if row["exchange"]]
    lags = [exchange["lag"] for exchange in exchanges]
    return {
        "machines": len(alive),
        "sent": round(sum(exchange["sent_rate"] for exchange in exchanges)),
        "received": round(sum(exchange["received_rate"] for exchange in exchanges)),
        "staleness": sum(lags) / len(lags) if lags else 0.0,
    }


def weights_agree(rows: list[dict[str, Any]]) -> bool | None:
    """Return whether live machines with the same updates have the same weights, by people.

    One person alone, with however many machines, does not deny what two others or more report.

    Returns:
        None if no two machines can be compared.
    """
    comparable = _at_one_vector(rows).values()
    return all(_is_undisputed(reports) for reports in comparable) if comparable else None


def _at_one_vector(rows: list[dict[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """Return version vector → (anchor, person) of live machines, where two or more are compared."""
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in rows:
        if row["alive"] and row["anchor"]:
            groups[row["vector"]].append((row["anchor"], row["owner"]))
    return {vector: reports for vector, reports in groups.items() if len(reports) > 1}


def _is_undisputed(reports: list[tuple[str, str]]) -> bool:
    """Return whether all have one anchor, or at most one person of several has another.

    The reports are (anchor, person) of each machine.
    """
    if len({anchor for anchor, _ in reports}) == 1:
        return True
    votes = count_votes(reports).values()
    people = sorted((vote.people for vote in votes), reverse=True)
    return any(vote.confirmed for vote in votes) and sum(people[1:]) < PEOPLE_NEEDED


def _find_commonest_anchor(reports: list[tuple[str, str]]) -> str | None:
    """Return the anchor that most people report or, where all machines are one person's, most.

    None if two are equally common: of two that differ neither is known to be right. The reports are
    (anchor, person) of each machine.
    """
    counts = Counter(anchor for anchor, _ in reports)
    if len({person for _, person in reports}) > 1:
        counts = Counter({name: vote.people for name, vote in count_votes(reports).items()})
    (anchor, most), *others = counts.most_common(2)
    return None if others and others[0][1] == most else anchor


def _live_count(run: Run, rows: list[dict[str, Any]], signed: dict[str, int]) -> RunCount:
    """Count the run's tokens from live figures, or return the stored count.

    The stored count stands where nobody reports, and where other mirrors have the newest figures of
    a machine: it is the one that weighs mirrors against each other.
    """
    stored = RunCount(run.ledger_tokens, run.ledger_people)
    alive = [row for row in rows if row["alive"] and row["activity"] in ACTIVITIES_WITH_LEDGER]
    if run.is_over or any(row["mirror"] for row in alive):
        return stored
    ledgers: dict[str, list[int]] = defaultdict(list)
    for row in alive:
        ledgers[row["owner"]].append(row["ledger_tokens"])
    return count_tokens(ledgers, str(run.owner_id), signed) or stored


def _sum_speeds(run: Run, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Sum each person's speed; nobody but the owner exceeds what one volunteer may state."""
    owner = str(run.owner_id)
    speeds = _sum_by_person(rows, "rate")
    most = volunteer_rate(run) if speeds.keys() - {owner} else 0
    return {pk: rate if pk == owner else min(rate, most) for pk, rate in speeds.items()}


def _sum_by_person(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Sum a figure over each person's machines."""
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        if row[name]:
            sums[row["owner"]] += row[name]
    return sums


def _load_figures(pks: list[str]) -> dict[str, dict[str, Any]]:
    """Return membership → its figures in Postgres."""
    rows = Membership.everywhere.filter(pk__in=pks).values("pk", "figures", *FIGURE_COLUMNS)
    return {str(row.pop("pk")): complete_figures(row.pop("figures"), row) for row in rows}
