"""The aggregate type "checkpoint", by run, version vector and digest: weights and holders."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from django.db.models import Q
from pydantic import AwareDatetime, Field

from barnraise.protocol.types import Count, Id, Message, PublicKey
from coordinator.accounts.models import Machine
from coordinator.eventlog import writer
from coordinator.eventlog.projection import current_state
from coordinator.eventlog.registry import AggregateType, Fact, State, require_row
from coordinator.runs.models import Run
from coordinator.telemetry.models import Checkpoint, CheckpointHolder

MAX_HOLDERS = 200  # in one event


class CheckpointAnnounced(Message):
    """A machine announced the weights."""

    id: Id
    tokens: Count
    checksum: str = Field(pattern=r"^[0-9a-f]{16}$")
    size: Count
    announced: AwareDatetime


class CheckpointConfirmed(Message):
    """Machines reported, at these times, that they hold exactly these weights."""

    holders: dict[PublicKey, AwareDatetime] = Field(min_length=1, max_length=MAX_HOLDERS)


class CheckpointDeleted(Message):
    """A mirror deleted it, because only one machine ever held it."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Merge the events of one digest at one vector.

    Announcements can differ only by a lie, so the first counts. Holders accumulate, each with the
    earliest time. A checkpoint that a mirror deleted, because only one machine ever held it, is
    deleted until a second machine holds it.
    """
    first = next((fact.payload for fact in facts if fact.action == "announce"), None)
    holders: dict[str, datetime] = {}
    for fact in facts:
        for key, at in fact.payload.holders.items() if fact.action == "confirm" else ():
            holders[key] = min(at, holders.get(key, at))
    if first is None or (len(holders) < 2 and any(fact.action == "delete" for fact in facts)):
        return None
    return first.model_dump(mode="json", exclude={"announced"}) | {
        "announced": first.announced.isoformat(),
        "holders": {key: at.isoformat() for key, at in sorted(holders.items())},
    }


def store(checkpoint_id: str, state: State | None) -> list[str] | None:
    """Write the checkpoint and its holders.

    Returns:
        Names of the machines that do not exist here yet.
    """
    run, vector, named = checkpoint_id.split(":")
    checkpoints = Checkpoint.objects.filter(run=run, vector=vector, digest=named)
    if state is None:
        checkpoints.delete()
        return None
    require_row(Run.objects.filter(pk=run), f"run:{run}")
    fields = {name: state[name] for name in ("tokens", "checksum", "size")}
    fields["announced"] = datetime.fromisoformat(state["announced"])
    if not checkpoints.update(**fields):
        Checkpoint.objects.bulk_create(
            [Checkpoint(id=state["id"], run_id=run, vector=vector, digest=named, **fields)]
        )
    checkpoint, holders = checkpoints.get(), state["holders"]
    machines = dict(Machine.objects.filter(key__in=holders).values_list("key", "pk"))
    CheckpointHolder.objects.bulk_create(
        [
            CheckpointHolder(
                checkpoint=checkpoint,
                machine_id=machine,
                reported=datetime.fromisoformat(holders[key]),
            )
            for key, machine in machines.items()
        ],
        ignore_conflicts=True,
    )
    return [f"machine:{key}" for key in holders if key not in machines]


def record_checkpoint_events() -> int:
    """Record what no event has recorded yet; return the number of events."""
    count = 0
    unpublished = Q(published=False) | Q(holdings__published=False)
    for checkpoint in Checkpoint.objects.filter(unpublished).distinct().order_by("pk")[:1000]:
        with writer.log_transaction():
            for action, payload in _new_events(checkpoint):
                writer.record(f"checkpoint.{action}", checkpoint.aggregate_name, payload)
                count += 1
    return count


def _new_events(checkpoint: Checkpoint) -> Iterable[tuple[str, dict]]:
    state = current_state(f"checkpoint:{checkpoint.aggregate_name}")
    if state is None:
        announcement = {
            name: getattr(checkpoint, name)
            for name in ("id", "tokens", "checksum", "size", "announced")
        }
        yield "announce", announcement
    rows = list(
        checkpoint.holdings.filter(published=False)
        .order_by("pk")
        .values_list("pk", "machine__key", "reported")
    )
    Checkpoint.objects.filter(pk=checkpoint.pk).update(published=True)
    CheckpointHolder.objects.filter(pk__in=[pk for pk, _, _ in rows]).update(published=True)
    fresh = {
        key: reported for _, key, reported in rows if key not in (state or {}).get("holders", {})
    }
    keys = sorted(fresh)
    for start in range(0, len(keys), MAX_HOLDERS):
        yield "confirm", {"holders": {key: fresh[key] for key in keys[start : start + MAX_HOLDERS]}}


AGGREGATE_TYPE = AggregateType(
    "checkpoint",
    {"announce": CheckpointAnnounced, "confirm": CheckpointConfirmed, "delete": CheckpointDeleted},
    fold,
    store,
)
