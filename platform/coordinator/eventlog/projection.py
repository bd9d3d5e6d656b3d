"""From accepted events to state: each subject folded from all its events, its digest in one commutative sum.

The sum over subjects of BLAKE3(subject, state), modulo 2²⁵⁶, does not depend on the order of anything: two mirrors with
the same accepted events publish the same 64 digits, and a change costs two digests however much there is.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from blake3 import blake3
from django.db import DatabaseError, transaction

from coordinator.eventlog import registry, uniqueness
from coordinator.eventlog.bulk_upsert import bulk_upsert
from coordinator.eventlog.models import Aggregate, LogEvent, LogState, PrivateData
from coordinator.eventlog.registry import DependencyMissingError, State, StoredEvent

log = logging.getLogger("coordinator.eventlog")
MODULUS = 1 << 256
BATCH_SIZE = 500  # subjects folded in one transaction


def canonical_json(state: State | None) -> str:
    """ "" for none."""
    return (
        ""
        if state is None
        else json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    )


def state_term(subject: str, text: str) -> int:
    """What a subject adds to the sum; nothing where there is no such thing."""
    return int(blake3(f"{subject}\0{text}".encode()).hexdigest(), 16) if text else 0


def fold_events(subject: str, events: Iterable[StoredEvent]) -> State | None:
    """Of one subject's accepted events, in whatever order. What this version does not understand says nothing."""
    kind = registry.aggregate_types().get(subject.partition(":")[0])
    facts = [
        fact
        for event in {event.digest: event for event in events}.values()
        if (fact := registry.decode_fact(event))
    ]
    return kind.fold(sorted(facts, key=lambda fact: fact.order_key)) if kind and facts else None


def current_state(subject: str) -> State | None:
    """What is known of a subject now."""
    text = Aggregate.objects.filter(pk=subject).values_list("state", flat=True).first()
    return json.loads(text) if text else None


def mark_stale(names: Collection[str]) -> None:
    """These have events now that they were not folded from; within `writer.log_transaction`."""
    fresh = [Aggregate(name=name, stale=True) for name in sorted(names)]
    bulk_upsert(fresh, update=["stale"])


def refold(names: Sequence[str], tally: LogState, *, store: bool, later: bool = False) -> int:
    """These subjects anew, from all their accepted events; within `writer.log_transaction`, whose tally that is. `store`: into rows
    as well (a local change has written them itself), or `later`, by `write_waiting`. How many changed."""
    events: dict[str, list[StoredEvent]] = defaultdict(list)
    found = LogEvent.objects.filter(subject__in=names, accepted=True).order_by()
    for event in found.values_list("subject", *StoredEvent._fields):
        events[event[0]].append(StoredEvent(*event[1:]))
    before = dict(Aggregate.objects.filter(pk__in=names).values_list("name", "state"))
    if store:  # what rows' writing recorded before may have moved it on
        tally.refresh_from_db()
    total, changed = int(tally.total, 16), []
    for name in names:
        state = fold_events(name, events[name])
        text, known = canonical_json(state), before.get(name)
        if text != known:
            total += state_term(name, text) - state_term(name, known or "")
            changed.append(Aggregate(name=name, state=text, stored=not store))
    bulk_upsert(changed, update=["state", "stale", "stored"])
    if same := set(names).difference(each.name for each in changed):
        Aggregate.objects.filter(pk__in=same, stale=True).update(stale=False)
    tally.total = f"{total % MODULUS:064x}"
    tally.save(update_fields=["total", "hlc"])
    _settle_particulars(changed)
    others = uniqueness.update_claims(changed)
    if later:
        Aggregate.objects.filter(pk__in=[each.name for each in others]).update(stored=False)
        return len(changed)
    write_rows([*changed, *others] if store else others)
    if others:
        write_pending_rows()
    return len(changed)


def _settle_particulars(changed: Sequence[Aggregate]) -> None:
    """What a state names is wanted or here; what none names any more goes."""
    wanted, names = [], []
    for subject in changed:
        kind = registry.aggregate_types()[subject.name.partition(":")[0]]
        if kind.private_digests is not registry.no_private_data:
            names.append(subject.name)
            needs = kind.private_digests(json.loads(subject.state)) if subject.state else []
            wanted += [PrivateData(digest=each, subject=subject.name) for each in needs]
    bulk_upsert(wanted)
    if names:
        PrivateData.objects.filter(subject__in=names).exclude(
            pk__in=[each.digest for each in wanted]
        ).delete()


def write_rows(subjects: Sequence[Aggregate]) -> int:
    """Into rows, those that others refer to first, and after them those that lacked one of these. How many could be
    written; the rest stays marked."""
    written = _write(subjects) if subjects else set()
    lacking = Aggregate.objects.exclude(lacks="") if written else ()
    if freed := [each for each in lacking if not written.isdisjoint(each.lacks.split())]:
        _write(freed)
    return len(written)


def _write(subjects: Sequence[Aggregate]) -> set[str]:
    """The names of those that could be. All in one go, and one by one only where the database refuses something."""
    order = list(registry.aggregate_types())
    ordered = sorted(
        subjects, key=lambda each: (order.index(each.name.partition(":")[0]), each.name)
    )
    written: list[Aggregate] = []
    try:
        with transaction.atomic():
            for kind, some in groupby(ordered, key=lambda each: each.name.partition(":")[0]):
                written += _stored_together(registry.aggregate_types()[kind], list(some))
    except DatabaseError:
        written = [subject for subject in ordered if _stored_alone(subject)]
    names = {subject.name for subject in written}
    Aggregate.objects.filter(pk__in={subject.name for subject in ordered} - names).update(
        stored=False
    )
    done = Aggregate.objects.filter(pk__in=names)
    done.exclude(stored=True, lacks="").update(stored=True, lacks="")
    Aggregate.objects.bulk_update([subject for subject in written if subject.lacks], ["lacks"])
    return names


def _stored_together(kind: registry.AggregateType, subjects: list[Aggregate]) -> list[Aggregate]:
    """Those of one kind that could be."""
    states = {
        each.name.partition(":")[2]: json.loads(each.state) for each in subjects if each.state
    }
    done = kind.store_batch(states) if len(states) > 1 else set()
    for each in subjects:
        if each.name.partition(":")[2] in done:
            each.stored, each.lacks = True, ""
    return [each for each in subjects if each.name.partition(":")[2] in done or _stored(each)]


def _stored(subject: Aggregate) -> bool:
    kind, _, which = subject.name.partition(":")
    try:
        lacks = registry.aggregate_types()[kind].store(
            which, json.loads(subject.state) if subject.state else None
        )
    except DependencyMissingError as wait:
        log.debug("%s waits for %s", subject.name, wait)
        return False
    subject.stored, subject.lacks = True, " ".join(lacks or ())
    return True


def _stored_alone(subject: Aggregate) -> bool:
    try:
        with transaction.atomic():
            return _stored(subject)
    except DatabaseError as error:
        log.error("what the log says of %s does not fit into rows: %s", subject.name, error)
        return False


def write_pending_rows() -> int:
    """Those that waited for others, as long as that gets anywhere."""
    order, done = list(registry.aggregate_types()), 0
    while names := list(Aggregate.objects.filter(stored=False).values_list("name", flat=True)):
        names.sort(key=lambda name: (order.index(name.partition(":")[0]), name))
        some = (names[start : start + BATCH_SIZE] for start in range(0, len(names), BATCH_SIZE))
        if not (
            wrote := sum(write_rows(list(Aggregate.objects.filter(pk__in=each))) for each in some)
        ):
            break
        done += wrote
    return done


def rebuild() -> int:
    """All subjects folded anew and written into rows again, after an upgrade that understands more of a kind than the
    version before. How many changed."""
    names = list(
        LogEvent.objects.filter(accepted=True, type__in=registry.event_types()).values_list(
            "subject", flat=True
        )
    )
    changed, names = 0, sorted({*names, *Aggregate.objects.values_list("name", flat=True)})
    for start in range(0, len(names), BATCH_SIZE):
        with transaction.atomic():
            tally = LogState.objects.select_for_update().get()
            some = names[start : start + BATCH_SIZE]
            changed += refold(some, tally, store=True)
            write_rows(list(Aggregate.objects.filter(pk__in=some)))
    write_pending_rows()
    return changed


def state_hash() -> str:
    """64 hex digits: equal on all mirrors that have accepted the same events and understand them."""
    return LogState.objects.values_list("total", flat=True).first() or LogState().total
