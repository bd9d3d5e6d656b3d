"""Test that a value which two mirrors assigned belongs to the same aggregate everywhere."""

import time
from random import Random

import pytest
from helpers.effort import examples
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.rebuild_site import (
    LOG,
    all_events,
    all_private_data,
    rebuild_in_random_order,
    replicated_rows,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barnraise.protocol.types import Message, ShortText
from coordinator.accounts.models import User
from coordinator.eventlog import ingest, private_data, projection, registry, uniqueness, writer
from coordinator.runs.models import Run


def test_slug_used_at_two_mirrors_goes_to_the_same_run_at_both(person, draft):
    """Use this site as both mirrors: it is emptied, then it ingests its former log."""
    ada = person()
    events = all_events()
    private_records = all_private_data()
    first = draft(ada, "Barn")
    slugs = {first.pk: "barn"}
    first_mirror_events = all_events()
    later_records = all_private_data()
    rebuild_in_random_order(events, private_records)
    second = draft(User.objects.get(), "Barn")
    assert second.slug == "barn"
    ingest.ingest_events(first_mirror_events)
    private_data.ingest(later_records)
    slugs = {run.pk: run.slug for run in Run.objects.all()}
    assert slugs == {first.pk: "barn", second.pk: f"barn-{second.pk.hex[-8:]}"}
    third = draft(User.objects.get(), "Barn")
    assert third.slug == f"barn-{third.pk.hex[-8:]}"
    both = replicated_rows(), projection.state_hash()
    for seed in range(3):
        assert rebuild_in_random_order(all_events(), all_private_data(), seed) == both


class SeatClaimed(Message):
    """Somebody claims a seat, or gives theirs up: ""."""

    seat: ShortText


@pytest.fixture
def seats():
    """Register guests, each of whom has the last seat claimed; yield guest → seat, as rows.

    A guest whose seat belongs to another gets one with their name.
    """
    rows: dict[str, str] = {}

    def fold(facts):
        last = facts[-1]
        seat = last.payload.seat
        return {"seat": seat, "claim": [last.hlc, str(last.id)]} if seat else None

    def store(guest, state):
        rows.pop(guest, None)
        if not state:
            return
        seat = state["seat"]
        owns = uniqueness.owns_value(f"guest:{guest}", "seat", seat)
        rows[guest] = seat if owns else f"{seat} {guest}"
        for other, taken in rows.items():
            if other != guest and taken == rows[guest]:
                rows[other] = f"{taken} {other}"
                uniqueness.mark_for_rewrite(f"guest:{other}")

    def unique_values(state):
        return {"seat": (state["seat"], *state["claim"])}

    guest = registry.AggregateType("guest", {"claim": SeatClaimed}, fold, store, unique_values)
    with registry.registered_temporarily(guest):
        yield rows


def test_earliest_claim_owns_and_is_succeeded_when_it_goes(db, seats):
    other = LogBuilder()
    late, early = time.time(), time.time() - 100
    for at, guest in ((early, "ada"), (late, "bob"), (late + 1, "eve")):
        other.append("guest.claim", guest, {"seat": "1"}, at=at)
    ingest.ingest_events(other.events)
    assert seats == {"ada": "1", "bob": "1 bob", "eve": "1 eve"}
    writer.record("guest.claim", "ada", {"seat": ""})
    ingest.project_pending()
    assert seats == {"bob": "1", "eve": "1 eve"}
    writer.record("guest.claim", "bob", {"seat": "2"})
    assert seats["eve"] == "1", "a change of the owner frees the value"
    assert not uniqueness.owns_value("guest:eve", "seat", "2")
    assert uniqueness.owns_value("guest:new", "seat", "3"), "nobody has claimed it"
    assert uniqueness.owns_value("guest:new", "desk", "1"), "it is claimed in another namespace"


CLAIMS = st.lists(
    st.tuples(
        st.sampled_from(["ada", "bob", "eve"]), st.sampled_from(["1", "2", ""]), st.integers(0, 9)
    ),
    max_size=9,
)


@settings(
    max_examples=examples(6, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(CLAIMS, CLAIMS, st.integers())
def test_each_value_has_one_owner_in_any_order_of_claims(db, seats, one, two, seed):
    """Let two mirrors record claims, and deliver their logs interleaved in two ways."""
    random = Random(seed)
    now = time.time() - 100
    logs = [LogBuilder(1), LogBuilder(2)]
    for log, claims in zip(logs, (one, two), strict=True):
        for guest, seat, later in claims:
            log.append("guest.claim", guest, {"seat": seat}, at=now + later)
    states = []
    for _ in range(2):
        for model in LOG:
            model.objects.all().delete()
        seats.clear()
        waiting = {log.origin: list(log.events) for log in logs}
        while any(waiting.values()):
            events = random.choice([events for events in waiting.values() if events])
            ingest.ingest_events([events.pop(0) for _ in range(min(len(events), 3))])
        states.append(dict(seats))
    assert states[0] == states[1]
    assert len(set(seats.values())) == len(seats)
    wanted = {seat.partition(" ")[0] for seat in seats.values()}
    assert wanted <= set(seats.values()), "nobody owns a value that several claim"
