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
from coordinator.eventlog.bulk_upsert import put
from coordinator.eventlog.models import LogEvent, Particulars, Subject, Tally
from coordinator.eventlog.registry import Entry, State, Waits

log = logging.getLogger("coordinator.eventlog")
MODULUS = 1 << 256
AT_ONCE = 500  # subjects folded in one transaction


def canonical(state: State | None) -> str:
    """ "" for none."""
    return (
        ""
        if state is None
        else json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    )


def weight(subject: str, text: str) -> int:
    """What a subject adds to the sum; nothing where there is no such thing."""
    return int(blake3(f"{subject}\0{text}".encode()).hexdigest(), 16) if text else 0


def folded(subject: str, events: Iterable[Entry]) -> State | None:
    """Of one subject's accepted events, in whatever order. What this version does not understand says nothing."""
    kind = registry.registered().get(subject.partition(":")[0])
    facts = [
        fact
        for event in {event.digest: event for event in events}.values()
        if (fact := registry.fact(event))
    ]
    return kind.fold(sorted(facts, key=lambda fact: fact.place)) if kind and facts else None


def current(subject: str) -> State | None:
    """What is known of a subject now."""
    text = Subject.objects.filter(pk=subject).values_list("state", flat=True).first()
    return json.loads(text) if text else None


def mark_stale(names: Collection[str]) -> None:
    """These have events now that they were not folded from; within `log.change`."""
    fresh = [Subject(name=name, stale=True) for name in sorted(names)]
    put(fresh, update=["stale"])


def fold(names: Sequence[str], tally: Tally, *, store: bool, later: bool = False) -> int:
    """These subjects anew, from all their accepted events; within `log.change`, whose tally that is. `store`: into rows
    as well (a local change has written them itself), or `later`, by `write_waiting`. How many changed."""
    events: dict[str, list[Entry]] = defaultdict(list)
    found = LogEvent.objects.filter(subject__in=names, accepted=True).order_by()
    for event in found.values_list("subject", *Entry._fields):
        events[event[0]].append(Entry(*event[1:]))
    before = dict(Subject.objects.filter(pk__in=names).values_list("name", "state"))
    if store:  # what rows' writing recorded before may have moved it on
        tally.refresh_from_db()
    total, changed = int(tally.total, 16), []
    for name in names:
        state = folded(name, events[name])
        text, known = canonical(state), before.get(name)
        if text != known:
            total += weight(name, text) - weight(name, known or "")
            changed.append(Subject(name=name, state=text, stored=not store))
    put(changed, update=["state", "stale", "stored"])
    if same := set(names).difference(each.name for each in changed):
        Subject.objects.filter(pk__in=same, stale=True).update(stale=False)
    tally.total = f"{total % MODULUS:064x}"
    tally.save(update_fields=["total", "hlc"])
    _settle_particulars(changed)
    others = uniqueness.settle(changed)
    if later:
        Subject.objects.filter(pk__in=[each.name for each in others]).update(stored=False)
        return len(changed)
    write([*changed, *others] if store else others)
    if others:
        write_waiting()
    return len(changed)


def _settle_particulars(changed: Sequence[Subject]) -> None:
    """What a state names is wanted or here; what none names any more goes."""
    wanted, names = [], []
    for subject in changed:
        kind = registry.registered()[subject.name.partition(":")[0]]
        if kind.needs is not registry.no_needs:
            names.append(subject.name)
            needs = kind.needs(json.loads(subject.state)) if subject.state else []
            wanted += [Particulars(digest=each, subject=subject.name) for each in needs]
    put(wanted)
    if names:
        Particulars.objects.filter(subject__in=names).exclude(
            pk__in=[each.digest for each in wanted]
        ).delete()


def write(subjects: Sequence[Subject]) -> int:
    """Into rows, those that others refer to first, and after them those that lacked one of these. How many could be
    written; the rest stays marked."""
    written = _write(subjects) if subjects else set()
    lacking = Subject.objects.exclude(lacks="") if written else ()
    if freed := [each for each in lacking if not written.isdisjoint(each.lacks.split())]:
        _write(freed)
    return len(written)


def _write(subjects: Sequence[Subject]) -> set[str]:
    """The names of those that could be. All in one go, and one by one only where the database refuses something."""
    order = list(registry.registered())
    ordered = sorted(
        subjects, key=lambda each: (order.index(each.name.partition(":")[0]), each.name)
    )
    written: list[Subject] = []
    try:
        with transaction.atomic():
            for kind, some in groupby(ordered, key=lambda each: each.name.partition(":")[0]):
                written += _stored_together(registry.registered()[kind], list(some))
    except DatabaseError:
        written = [subject for subject in ordered if _stored_alone(subject)]
    names = {subject.name for subject in written}
    Subject.objects.filter(pk__in={subject.name for subject in ordered} - names).update(
        stored=False
    )
    done = Subject.objects.filter(pk__in=names)
    done.exclude(stored=True, lacks="").update(stored=True, lacks="")
    Subject.objects.bulk_update([subject for subject in written if subject.lacks], ["lacks"])
    return names


def _stored_together(kind: registry.Kind, subjects: list[Subject]) -> list[Subject]:
    """Those of one kind that could be."""
    states = {
        each.name.partition(":")[2]: json.loads(each.state) for each in subjects if each.state
    }
    done = kind.together(states) if len(states) > 1 else set()
    for each in subjects:
        if each.name.partition(":")[2] in done:
            each.stored, each.lacks = True, ""
    return [each for each in subjects if each.name.partition(":")[2] in done or _stored(each)]


def _stored(subject: Subject) -> bool:
    kind, _, which = subject.name.partition(":")
    try:
        lacks = registry.registered()[kind].store(
            which, json.loads(subject.state) if subject.state else None
        )
    except Waits as wait:
        log.debug("%s waits for %s", subject.name, wait)
        return False
    subject.stored, subject.lacks = True, " ".join(lacks or ())
    return True


def _stored_alone(subject: Subject) -> bool:
    try:
        with transaction.atomic():
            return _stored(subject)
    except DatabaseError as error:
        log.error("what the log says of %s does not fit into rows: %s", subject.name, error)
        return False


def write_waiting() -> int:
    """Those that waited for others, as long as that gets anywhere."""
    order, done = list(registry.registered()), 0
    while names := list(Subject.objects.filter(stored=False).values_list("name", flat=True)):
        names.sort(key=lambda name: (order.index(name.partition(":")[0]), name))
        some = (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))
        if not (wrote := sum(write(list(Subject.objects.filter(pk__in=each))) for each in some)):
            break
        done += wrote
    return done


def rebuild() -> int:
    """All subjects folded anew and written into rows again, after an upgrade that understands more of a kind than the
    version before. How many changed."""
    names = list(
        LogEvent.objects.filter(accepted=True, type__in=registry.types()).values_list(
            "subject", flat=True
        )
    )
    changed, names = 0, sorted({*names, *Subject.objects.values_list("name", flat=True)})
    for start in range(0, len(names), AT_ONCE):
        with transaction.atomic():
            tally = Tally.objects.select_for_update().get()
            some = names[start : start + AT_ONCE]
            changed += fold(some, tally, store=True)
            write(list(Subject.objects.filter(pk__in=some)))
    write_waiting()
    return changed


def state_hash() -> str:
    """64 hex digits: equal on all mirrors that have accepted the same events and understand them."""
    return Tally.objects.values_list("total", flat=True).first() or Tally().total
