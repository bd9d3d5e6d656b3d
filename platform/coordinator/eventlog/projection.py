"""Project accepted events to state and rows.

Each aggregate is folded from all its events. The state hash is the sum over all aggregates of
BLAKE3(name, state) modulo 2²⁵⁶. A sum does not depend on any order, so two mirrors with the same
accepted events publish the same 64 digits, and a change costs two digests however large the site.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from blake3 import blake3
from django.db import DatabaseError, transaction

from coordinator.eventlog import registry, uniqueness
from coordinator.eventlog.models import Aggregate, LogEvent, LogState, PrivateData
from coordinator.eventlog.registry import DependencyMissingError, State, StoredEvent
from coordinator.lib.bulk_upsert import bulk_upsert

log = logging.getLogger("coordinator.eventlog")
MODULUS = 1 << 256
BATCH_SIZE = 500  # aggregates folded in one transaction


def canonical_json(state: State | None) -> str:
    """Encode a state as the one text that all mirrors hash; "" for None."""
    if state is None:
        return ""
    return json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def state_term(name: str, text: str) -> int:
    """Return what an aggregate adds to the state hash; 0 if it does not exist (`text` is "")."""
    return int(blake3(f"{name}\0{text}".encode()).hexdigest(), 16) if text else 0


def fold_events(name: str, events: Iterable[StoredEvent]) -> State | None:
    """Fold one aggregate's accepted events, in any order, as far as they are understood."""
    aggregate_type = registry.aggregate_types().get(_type_of(name))
    unique_events = {event.digest: event for event in events}.values()
    facts = [fact for event in unique_events if (fact := registry.decode_fact(event))]
    if aggregate_type is None or not facts:
        return None
    return aggregate_type.fold(sorted(facts, key=lambda fact: fact.order_key))


def current_state(name: str) -> State | None:
    """Return the stored state of an aggregate."""
    text = Aggregate.objects.filter(pk=name).values_list("state", flat=True).first()
    return json.loads(text) if text else None


def mark_stale(names: Collection[str]) -> None:
    """Mark aggregates that have events which were not folded yet, in a `log_transaction`."""
    rows = [Aggregate(name=name, stale=True) for name in sorted(names)]
    bulk_upsert(rows, update=["stale"])


def refold(names: Sequence[str], log_state: LogState, *, store: bool, defer: bool = False) -> int:
    """Fold aggregates again from all their accepted events, in a `log_transaction`.

    Args:
        names: Names of the aggregates.
        log_state: The locked row of that transaction.
        store: Write rows as well; False for a local change, which has written them itself.
        defer: Leave writing rows to `write_pending_rows`.

    Returns:
        The number of aggregates whose state changed.
    """
    events: dict[str, list[StoredEvent]] = defaultdict(list)
    accepted = LogEvent.objects.filter(aggregate__in=names, accepted=True).order_by()
    for name, *columns in accepted.values_list("aggregate", *StoredEvent._fields):
        events[name].append(StoredEvent(*columns))
    texts = dict(Aggregate.objects.filter(pk__in=names).values_list("name", "state"))
    if store:  # writing rows before may have recorded events, which changed the log state
        log_state.refresh_from_db()
    total = int(log_state.state_sum, 16)
    changed: list[Aggregate] = []
    for name in names:
        text = canonical_json(fold_events(name, events[name]))
        before = texts.get(name)
        if text != before:
            total += state_term(name, text) - state_term(name, before or "")
            changed.append(Aggregate(name=name, state=text, projected=not store))
    bulk_upsert(changed, update=["state", "stale", "projected"])
    unchanged = set(names).difference(aggregate.name for aggregate in changed)
    if unchanged:
        Aggregate.objects.filter(pk__in=unchanged, stale=True).update(stale=False)
    log_state.state_sum = f"{total % MODULUS:064x}"
    log_state.save(update_fields=["state_sum", "hlc"])
    _update_private_data(changed)
    others = uniqueness.update_claims(changed)
    if defer:
        Aggregate.objects.filter(pk__in=[aggregate.name for aggregate in others]).update(
            projected=False
        )
        return len(changed)
    write_rows([*changed, *others] if store else others)
    if others:
        write_pending_rows()
    return len(changed)


def _update_private_data(changed: Sequence[Aggregate]) -> None:
    """Mark private data that new states name as wanted; delete what no state names."""
    wanted: list[PrivateData] = []
    names = []
    for aggregate in changed:
        aggregate_type = registry.aggregate_types()[_type_of(aggregate.name)]
        if aggregate_type.private_digests is None:
            continue
        names.append(aggregate.name)
        if aggregate.state:
            digests = aggregate_type.private_digests(json.loads(aggregate.state))
            wanted += [PrivateData(digest=each, aggregate=aggregate.name) for each in digests]
    bulk_upsert(wanted)
    if names:
        named = [each.digest for each in wanted]
        PrivateData.objects.filter(aggregate__in=names).exclude(pk__in=named).delete()


def write_rows(aggregates: Sequence[Aggregate]) -> int:
    """Write states into rows: referenced aggregates first, then those that omitted a reference.

    Returns:
        How many could be written; the others stay marked.
    """
    written = _write_ordered(aggregates) if aggregates else set()
    waiting = Aggregate.objects.exclude(missing_references="") if written else ()
    completable = [
        aggregate
        for aggregate in waiting
        if not written.isdisjoint(aggregate.missing_references.split())
    ]
    if completable:
        _write_ordered(completable)
    return len(written)


def _write_ordered(aggregates: Sequence[Aggregate]) -> set[str]:
    """Write all aggregates together, or singly if the database refuses; return those written."""
    ordered = sorted(aggregates, key=lambda aggregate: _write_order(aggregate.name))
    written: list[Aggregate] = []
    try:
        with transaction.atomic():
            for type_name, group in groupby(
                ordered, key=lambda aggregate: _type_of(aggregate.name)
            ):
                written += _write_group(registry.aggregate_types()[type_name], list(group))
    except DatabaseError:
        written = [aggregate for aggregate in ordered if _write_isolated(aggregate)]
    names = {aggregate.name for aggregate in written}
    unwritten = {aggregate.name for aggregate in ordered} - names
    Aggregate.objects.filter(pk__in=unwritten).update(projected=False)
    outdated = Aggregate.objects.filter(pk__in=names).exclude(projected=True, missing_references="")
    outdated.update(projected=True, missing_references="")
    Aggregate.objects.bulk_update(
        [aggregate for aggregate in written if aggregate.missing_references], ["missing_references"]
    )
    return names


def _write_order(name: str) -> tuple[int, str]:
    """Return the sort key that puts aggregates which others refer to first."""
    return registry.registration_index(_type_of(name)), name


def _type_of(name: str) -> str:
    return name.partition(":")[0]


def _write_group(
    aggregate_type: registry.AggregateType, aggregates: list[Aggregate]
) -> list[Aggregate]:
    """Write aggregates of one type; return those that could be written."""
    states = {
        aggregate.name.partition(":")[2]: json.loads(aggregate.state)
        for aggregate in aggregates
        if aggregate.state
    }
    store_batch = aggregate_type.store_batch if len(states) > 1 else None
    in_batch = store_batch(states) if store_batch else set()
    written = []
    for aggregate in aggregates:
        if aggregate.name.partition(":")[2] in in_batch:
            aggregate.projected = True
            aggregate.missing_references = ""
            written.append(aggregate)
        elif _write_one(aggregate):
            written.append(aggregate)
    return written


def _write_one(aggregate: Aggregate) -> bool:
    """Write one aggregate's rows; False if it must wait for another aggregate."""
    type_name, _, name = aggregate.name.partition(":")
    state = json.loads(aggregate.state) if aggregate.state else None
    try:
        missing = registry.aggregate_types()[type_name].store(name, state)
    except DependencyMissingError as error:
        log.debug("%s waits for %s", aggregate.name, error)
        return False
    aggregate.projected = True
    aggregate.missing_references = " ".join(missing or ())
    return True


def mark_reference_lost(reference: str) -> None:
    """Let what refers to a deleted row ("team:0192…") be written again if the row returns."""
    name = reference.partition(":")[2]
    referring = Aggregate.objects.filter(state__contains=name, missing_references="")
    referring.exclude(pk=reference).update(missing_references=reference)


def _write_isolated(aggregate: Aggregate) -> bool:
    """Write one aggregate in a savepoint, so that an error of the database costs no other row."""
    try:
        with transaction.atomic():
            return _write_one(aggregate)
    except DatabaseError as error:
        log.error("the state of %s does not fit into rows: %s", aggregate.name, error)
        return False


def write_pending_rows() -> int:
    """Write aggregates that waited for others, until a pass writes none; return how many."""
    total = 0
    while True:
        names = list(Aggregate.objects.filter(projected=False).values_list("name", flat=True))
        names.sort(key=_write_order)
        batches = (names[start : start + BATCH_SIZE] for start in range(0, len(names), BATCH_SIZE))
        written = sum(write_rows(list(Aggregate.objects.filter(pk__in=batch))) for batch in batches)
        if not written:
            return total
        total += written


def rebuild() -> int:
    """Fold all aggregates again and rewrite their rows; return how many changed.

    For use after an upgrade that interprets an aggregate type's events differently.
    """
    understood = LogEvent.objects.filter(accepted=True, type__in=registry.event_types())
    names = sorted(
        {
            *understood.values_list("aggregate", flat=True),
            *Aggregate.objects.values_list("name", flat=True),
        }
    )
    changed = 0
    for start in range(0, len(names), BATCH_SIZE):
        with transaction.atomic():
            log_state = LogState.objects.select_for_update().get()
            batch = names[start : start + BATCH_SIZE]
            changed += refold(batch, log_state, store=True)
            write_rows(list(Aggregate.objects.filter(pk__in=batch)))
    write_pending_rows()
    return changed


def state_hash() -> str:
    """Return 64 hex digits, equal at all mirrors that accepted and understand the same events."""
    stored = LogState.objects.values_list("state_sum", flat=True).first()
    return stored or LogState().state_sum
