"""A database that other code made is found, whatever its table of migrations says."""

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from coordinator.lib import schema_comparison
from coordinator.staff import doctor
from coordinator.staff.doctor import Health

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _fresh_process():
    schema_comparison.forget()
    yield
    schema_comparison.forget()


def name_unique_constraint(table: str, column: str) -> str:
    with connection.cursor() as cursor:
        constraints = connection.introspection.get_constraints(cursor, table)
    return next(
        name
        for name, entry in constraints.items()
        if entry["columns"] == [column] and entry["unique"]
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "ALTER TABLE accounts_enrolment RENAME description TO about",
            "The table accounts_enrolment lacks the column description",
        ),
        (
            "ALTER TABLE accounts_enrolment ADD about text NOT NULL",
            "The table accounts_enrolment requires the unknown column about",
        ),
        ("DROP TABLE audit_auditentry CASCADE", "The database lacks the table audit_auditentry"),
        (
            "DROP INDEX events_of_an_aggregate",
            "The table eventlog_logevent lacks the index or constraint events_of_an_aggregate",
        ),
        (
            "ALTER TABLE accounts_user DROP CONSTRAINT {unique}",
            "The table accounts_user lacks a unique index of email",
        ),
    ],
)
def test_database_that_other_code_made_is_refused_by_all(client, valkey, change, sentence):
    unique = name_unique_constraint("accounts_user", "email")
    assert client.get("/readyz").json()["database"] == "ok"
    schema_comparison.forget()
    with connection.cursor() as cursor:
        cursor.execute(change.format(unique=unique))
    answer = client.get("/readyz")
    assert answer.status_code == 503 and answer.json()["database"].startswith(sentence)
    (finding,) = doctor.check_database()
    assert finding.verdict is Health.FAILURE and "operate.md#upgrade" in finding.sentence
    with pytest.raises(CommandError, match=sentence):
        call_command("migrate", verbosity=0)


def test_tables_of_the_applied_migrations_may_be_migrated():
    """Migrations that are not applied are no difference: `migrate` applies them."""
    call_command("migrate", verbosity=0)
    assert schema_comparison.DatabaseSchema().find_difference() == ""
