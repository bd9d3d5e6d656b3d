"""The kind "checkpoint", by run, version vector and digest: that such weights were announced, and which machines said
that they had exactly these."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from django.db.models import Q
from pydantic import AwareDatetime, Field

from barnraise.protocol.types import Count, Id, Message, PublicKey
from coordinator.accounts.models import Machine
from coordinator.eventlog import writer
from coordinator.eventlog.projection import current_state
from coordinator.eventlog.registry import AggregateType, DependencyMissingError, Fact, State
from coordinator.runs.models import Run
from coordinator.telemetry.models import Checkpoint, CheckpointHolder

HOLDERS = 200  # that one event names


class CheckpointAnnounced(Message):
    id: Id
    tokens: Count
    checksum: str = Field(pattern=r"^[0-9a-f]{16}$")
    size: Count
    announced: AwareDatetime


class CheckpointConfirmed(Message):
    holders: dict[PublicKey, AwareDatetime] = Field(min_length=1, max_length=HOLDERS)


class CheckpointDeleted(Message):
    pass


def fold(facts: Sequence[Fact]) -> State | None:
    """What was said of one digest at one vector cannot differ but by a lie: the first announcement counts. Holders add
    up, each with the earliest time. A checkpoint that a mirror forgot, because only one machine ever spoke of it, is
    gone until a second one does."""
    first = next((fact.payload for fact in facts if fact.action == "announce"), None)
    holders: dict[str, datetime] = {}
    for fact in facts:
        for key, at in fact.payload.holders.items() if fact.action == "hold" else ():
            holders[key] = min(at, holders.get(key, at))
    if first is None or (len(holders) < 2 and any(fact.action == "forget" for fact in facts)):
        return None
    return first.model_dump(mode="json", exclude={"announced"}) | {
        "announced": first.announced.isoformat(),
        "holders": {key: at.isoformat() for key, at in sorted(holders.items())},
    }


def store(which: str, state: State | None) -> list[str] | None:
    run, vector, named = which.split(":")
    found = Checkpoint.objects.filter(run=run, vector=vector, digest=named)
    if state is None:
        found.delete()
        return None
    if not Run.objects.filter(pk=run).exists():
        raise DependencyMissingError(f"run:{run}")
    fields = {name: state[name] for name in ("tokens", "checksum", "size")}
    fields["announced"] = datetime.fromisoformat(state["announced"])
    if not found.update(**fields):
        Checkpoint.objects.bulk_create(
            [Checkpoint(id=state["id"], run_id=run, vector=vector, digest=named, **fields)]
        )
    checkpoint, holders = found.get(), state["holders"]
    machines = dict(Machine.objects.filter(key__in=holders).values_list("key", "pk"))
    CheckpointHolder.objects.bulk_create(
        [
            CheckpointHolder(
                checkpoint=checkpoint, machine_id=machine, said=datetime.fromisoformat(holders[key])
            )
            for key, machine in machines.items()
        ],
        ignore_conflicts=True,
    )
    return [f"machine:{key}" for key in holders if key not in machines]


def record_checkpoint_events() -> int:
    """What no event has told yet. How many events that took."""
    told = 0
    quiet = Q(told=False) | Q(holdings__told=False)
    for checkpoint in Checkpoint.objects.filter(quiet).distinct().order_by("pk")[:1000]:
        with writer.log_transaction():
            for what, said in _news(checkpoint):
                writer.record(f"checkpoint.{what}", checkpoint.aggregate_name, said)
                told += 1
    return told


def _news(checkpoint: Checkpoint) -> Iterable[tuple[str, dict]]:
    known = current_state(f"checkpoint:{checkpoint.aggregate_name}")
    if known is None:
        kept = {
            name: getattr(checkpoint, name)
            for name in ("id", "tokens", "checksum", "size", "announced")
        }
        yield "announce", kept
    rows = list(
        checkpoint.holdings.filter(told=False)
        .order_by("pk")
        .values_list("pk", "machine__key", "said")
    )
    Checkpoint.objects.filter(pk=checkpoint.pk).update(told=True)
    CheckpointHolder.objects.filter(pk__in=[pk for pk, _, _ in rows]).update(told=True)
    fresh = {key: said for _, key, said in rows if key not in (known or {}).get("holders", {})}
    keys = sorted(fresh)
    for start in range(0, len(keys), HOLDERS):
        yield "hold", {"holders": {key: fresh[key] for key in keys[start : start + HOLDERS]}}


AGGREGATE_TYPE = AggregateType(
    "checkpoint",
    {"announce": CheckpointAnnounced, "hold": CheckpointConfirmed, "forget": CheckpointDeleted},
    fold,
    store,
)
