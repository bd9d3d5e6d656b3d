"""Test that bulk_upsert stores the same rows as Django, whatever their content."""

from datetime import UTC, datetime

import hypothesis.strategies as st
import pytest
from django.db import DatabaseError
from hypothesis import HealthCheck, given, settings

from coordinator.accounts.models import Machine, User
from coordinator.eventlog.models import Aggregate
from coordinator.lib.bulk_upsert import bulk_upsert

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
NAMES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.django_db
@given(
    st.dictionaries(NAMES, st.tuples(TEXT, st.booleans()), max_size=6),
    st.sets(st.sampled_from(["state", "stale"])),
)
def test_text_is_stored_as_django_would_store_it(rows, update):
    Aggregate.objects.all().delete()
    before = [
        Aggregate(name=name, state="before", missing_references=name) for name in sorted(rows)[::2]
    ]
    Aggregate.objects.bulk_create(before)
    bulk_upsert(
        [Aggregate(name=name, state=text, stale=stale) for name, (text, stale) in rows.items()],
        update=sorted(update),
    )
    stored = {
        aggregate.name: (aggregate.state, aggregate.stale, aggregate.missing_references)
        for aggregate in Aggregate.objects.all()
    }
    for name, (text, stale) in rows.items():
        if name in sorted(rows)[::2]:
            assert stored.pop(name) == (
                text if "state" in update else "before",
                stale and "stale" in update,
                name,
            )
        else:
            assert stored.pop(name) == (text, stale, "")
    assert not stored


@pytest.mark.django_db
def test_numbers_times_and_nulls_are_stored_unchanged():
    ada = User.objects.create_user("ada@example.org")
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    machine = Machine(
        key="a" * 64,
        owner=ada,
        hostname='pc "1"',
        cores=8,
        memory_bytes=2**60,
        enrolled=at,
        revoked=None,
    )
    bulk_upsert([machine])
    stored = Machine.objects.get()
    for field in Machine._meta.concrete_fields:
        assert getattr(stored, field.attname) == getattr(machine, field.attname), field.name
    bulk_upsert(
        [Machine(id=machine.id, key="b" * 64, owner=ada, enrolled=at, revoked=at)],
        update=["revoked"],
    )
    stored.refresh_from_db()
    assert (stored.key, stored.revoked) == ("a" * 64, at)


def test_row_that_violates_a_constraint_stores_nothing(transactional_db):
    with pytest.raises(DatabaseError):
        bulk_upsert([Aggregate(name="fits"), Aggregate(name="n" * 211)])
    assert not Aggregate.objects.exists()
