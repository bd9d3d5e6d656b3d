"""Memberships get UUIDv7 for keys: rows of a site from before keep all that belongs to them."""

import uuid

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

BEFORE = [
    ("fleet", "0004_rest_measured"),
    ("telemetry", "0004_credit"),
    ("accounts", "0002_people"),
]
AFTER = [("fleet", "0005_membership_uuid"), ("telemetry", "0004_credit")]


@pytest.fixture
def site_of_before(valkey):
    """A database of its own with the tables as they were."""
    name = f"before_{uuid.uuid4().hex[:8]}"
    usual = connection.settings_dict["NAME"]
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    connection.close()
    connection.close_pool()
    connection.settings_dict["NAME"] = name
    try:
        executor = MigrationExecutor(connection)
        executor.migrate(BEFORE)
        yield executor.loader.project_state(BEFORE).apps
    finally:
        connection.close()
        connection.close_pool()
        connection.settings_dict["NAME"] = usual
        with connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.django_db(transaction=True)
def test_a_membership_keeps_its_sums_losses_and_receipts_when_its_key_becomes_a_uuid(
    site_of_before,
):
    old = site_of_before.get_model
    owner = old("accounts", "User").objects.create(email="ada@example.org")
    run = old("runs", "Run").objects.create(name="A run", slug="a-run", owner=owner, draft={})
    for n in range(3):
        machine = old("accounts", "Machine").objects.create(key=f"{n:064x}", owner=owner)
        member = old("fleet", "Membership").objects.create(
            run=run, machine=machine, tokens=n, joined=timezone.now()
        )
        old("telemetry", "Rollup").objects.create(
            membership=member, width=10, bucket=10 * n, tokens=n
        )
        old("telemetry", "Point").objects.create(
            membership=member, seq=n, position=0, kind="train", tokens=n, loss=n, at=1
        )
        old("telemetry", "Receipt").objects.create(membership=member, seq=n)

    executor = MigrationExecutor(connection)
    executor.migrate(AFTER)
    new = executor.loader.project_state(AFTER).apps.get_model
    members = list(new("fleet", "Membership").objects.order_by("pk"))
    assert [member.tokens for member in members] == [0, 1, 2], "in the order in which they began"
    assert all(member.pk.version == 7 for member in members)
    for n, member in enumerate(members):
        assert new("telemetry", "Rollup").objects.get(membership=member).tokens == n
        assert new("telemetry", "Point").objects.get(membership=member).loss == n
        assert new("telemetry", "Receipt").objects.get(membership=member).seq == n
    again = {"membership": members[0], "width": 10, "bucket": 0}
    with pytest.raises(IntegrityError), transaction.atomic():
        new("telemetry", "Rollup").objects.create(**again)  # the rules are there again…
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_indexes WHERE indexdef LIKE '%(membership_id%'")
        assert cursor.fetchone()[0] >= 7  # …and the indexes
    with pytest.raises(IntegrityError), transaction.atomic():
        new("telemetry", "Receipt").objects.create(membership_id=uuid.uuid4(), seq=9)
        connection.check_constraints()
