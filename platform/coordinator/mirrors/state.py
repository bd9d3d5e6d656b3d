"""From accepted events to state: each subject folded from all its events, its digest in one commutative sum.

The sum over subjects of BLAKE3(subject, state), modulo 2²⁵⁶, does not depend on the order of anything: two mirrors with
the same accepted events publish the same 64 digits, and a change costs two digests however much there is.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from blake3 import blake3
from django.db import DatabaseError, transaction

from coordinator.mirrors import kinds
from coordinator.mirrors.kinds import State, Waits
from coordinator.mirrors.models import LogEvent, Subject, Tally

log = logging.getLogger("coordinator.mirrors")
MODULUS = 1 << 256
AT_ONCE = 500  # subjects folded in one transaction


def canonical(state: State | None) -> str:
    """ "" for none."""
    return "" if state is None else json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def weight(subject: str, text: str) -> int:
    """What a subject adds to the sum; nothing where there is no such thing."""
    return int(blake3(f"{subject}\0{text}".encode()).hexdigest(), 16) if text else 0


def folded(subject: str, events: Iterable[LogEvent]) -> State | None:
    """Of one subject's accepted events, in whatever order. What this version does not understand says nothing."""
    kind = kinds.registered().get(subject.partition(":")[0])
    facts = [fact for event in events if (fact := kinds.fact(event))]
    return kind.fold(sorted(facts, key=lambda fact: fact.place)) if kind and facts else None


def current(subject: str) -> State | None:
    """What is known of a subject now."""
    text = Subject.objects.filter(pk=subject).values_list("state", flat=True).first()
    return json.loads(text) if text else None


def is_known(subject: str) -> bool:
    """Whether any event spoke of it, be it gone since."""
    return Subject.objects.filter(pk=subject).exists()


def fold(names: Sequence[str], tally: Tally, *, store: bool) -> int:
    """These subjects anew, from all their accepted events; within `log.change`, whose tally that is. `store`: into rows
    as well (a local change has written them itself). How many changed."""
    events: dict[str, list[LogEvent]] = defaultdict(list)
    for event in LogEvent.objects.filter(subject__in=names, accepted=True):
        events[event.subject].append(event)
    before = dict(Subject.objects.filter(pk__in=names).values_list("name", "state"))
    total, changed = int(tally.total, 16), []
    for name in names:
        state = folded(name, events[name])
        text, known = canonical(state), before.get(name)
        if text != known:
            total += weight(name, text) - weight(name, known or "")
            changed.append(Subject(name=name, state=text, stored=not store))
    Subject.objects.bulk_create(
        changed, update_conflicts=True, unique_fields=["name"], update_fields=["state", "stored"]
    )
    tally.total = f"{total % MODULUS:064x}"
    tally.save(update_fields=["total", "hlc"])
    if store:
        write(changed)
    return len(changed)


def write(subjects: Iterable[Subject]) -> int:
    """Into rows, those that others refer to first. How many could be written; the rest stays marked."""
    order = list(kinds.registered())
    written = []
    for subject in sorted(subjects, key=lambda each: (order.index(each.name.partition(":")[0]), each.name)):
        kind, _, which = subject.name.partition(":")
        try:
            with transaction.atomic():
                kinds.registered()[kind].store(which, json.loads(subject.state) if subject.state else None)
        except Waits as wait:
            log.debug("%s waits for %s", subject.name, wait)
        except DatabaseError as error:
            log.error("what the log says of %s does not fit into rows: %s", subject.name, error)
        else:
            written.append(subject.name)
    Subject.objects.filter(pk__in=written).update(stored=True)
    return len(written)


def write_waiting() -> int:
    """Those that waited for others, as long as that gets anywhere."""
    done = 0
    while (waiting := list(Subject.objects.filter(stored=False))) and (wrote := write(waiting)):
        done += wrote
    return done


def state_hash() -> str:
    """64 hex digits: equal on all mirrors that have accepted the same events and understand them."""
    return Tally.objects.values_list("total", flat=True).first() or Tally().total
