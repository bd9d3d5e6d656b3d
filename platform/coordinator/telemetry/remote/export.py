"""What this mirror tells another of the machines that report to it: what changed since a place, a page at a time."""

import time
from collections.abc import Iterable
from typing import Any, TypeVar
from uuid import UUID

from django.db.models import BigAutoField, BooleanField, F, Func, Model, QuerySet, UUIDField, Value
from django.db.models.lookups import GreaterThan

from barnraise.protocol.signing import digest
from coordinator.fleet.models import Membership
from coordinator.lib import site_identity
from coordinator.telemetry.models import Event, Point, Rollup
from coordinator.telemetry.remote.protocol import (
    COMINGS,
    FRAMES,
    NUMBERS,
    POINTS,
    SUMS,
    Bulletin,
    Coming,
    Frame,
    Measured,
    News,
    Place,
    Places,
    Sum,
    Wanted,
    Word,
)

M = TypeVar("M", bound=Model)
THEIRS = ("membership__run", "membership__machine__key")
OF_SUM, OF_POINT = Sum._fields[1:], Measured._fields[1:]
FIRST = {UUIDField: str(UUID(int=0)), BigAutoField: "0"}  # what is before every id


class Row(Func):
    """Compared column by column, as an index is sorted."""

    function, output_field = "ROW", BooleanField()


def page(wanted: Wanted, to: str) -> Bulletin:
    """For the mirror `to`, by its key; signed by ours."""
    text = news(wanted.after).model_dump_json()
    said = Word(mirror=site_identity.identity().key, to=to, nonce=wanted.nonce, digest=digest(text))
    return Bulletin(word=site_identity.identity().sign("news", said), text=text)


def news(after: Places) -> News:
    """Four questions to Postgres, each answered from an index, however much there is."""
    machines: dict[tuple[str, str], int] = {}

    def of(run: UUID, key: str) -> int:
        return machines.setdefault((str(run), key), len(machines))

    members = _beyond(
        Membership.objects.filter(latest__gt=0).select_related("machine"), after.frames, FRAMES
    )
    sums = _beyond(Rollup.objects.all(), after.sums, SUMS, *THEIRS, *OF_SUM)
    points = _beyond(Point.objects.all(), after.points, POINTS, *THEIRS, *OF_POINT)
    events = _beyond(
        Event.objects.all(), after.comings, COMINGS, "run", "machine__key", "kind", "at"
    )
    now = time.time()
    return News(
        frames=[_frame(m, of(m.run_id, m.machine.key), now, after.frames.moment) for m in members],
        sums=[Sum(of(run, key), *told) for _, _, run, key, *told in sums],
        points=[Measured(of(run, key), *told) for _, _, run, key, *told in points],
        comings=[
            Coming(of(run, key), str(pk), kind, at.timestamp())
            for _, pk, run, key, kind, at in events
        ],
        places=Places(
            frames=_place(((m.changed, m.pk) for m in members), after.frames),
            sums=_place(sums, after.sums),
            points=_place(points, after.points),
            comings=_place(events, after.comings),
        ),
        more=len(members) == FRAMES
        or len(sums) == SUMS
        or len(points) == POINTS
        or len(events) == COMINGS,
        machines=list(machines),
    )


def _beyond(rows: QuerySet[M], after: Place, most: int, *names: str) -> list[Any]:
    """The first `most` rows of ours past a place: (changed, id, *names) each, or whole ones without names."""
    pk = rows.model._meta.pk
    last = after.id or FIRST[type(pk)]
    beyond = GreaterThan(
        Row(F("changed"), F("id")), Row(Value(after.moment), Value(pk.to_python(last), type(pk)()))
    )
    found = rows.filter(beyond, changed__isnull=False).order_by("changed", "id")[:most]
    return list(found.values_list("changed", "id", *names) if names else found)


def _place(rows: Iterable[Any], before: Place) -> Place:
    *_, last = before, *(Place(row[0], str(row[1])) for row in rows)
    return last


def _frame(member: Membership, of: int, now: float, known: int) -> Frame:
    """`known`: the moment up to which the asker knows of plans."""
    return Frame(
        of=of,
        age=max(0.0, now - member.heard.timestamp()),
        anchor=member.anchor or None,
        safe=member.safe is not None,
        exchange=member.exchange,
        plan=member.plan if member.planned >= known else None,
        **{name: getattr(member, name) for name in NUMBERS},
    )
