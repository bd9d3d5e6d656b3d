"""The two hand-written SQL statements behind every report: who sent it, and the membership.

Thousands of reports arrive in a minute, and building these queries with the ORM took two fifths of
a report's cost. The results are model instances with only the columns named here; any other column
is read on access.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Generic, TypeVar, cast

from django.db import connection
from django.db.models import Model

from coordinator.accounts.models import Machine, User
from coordinator.fleet.machine_state import MachinePause
from coordinator.fleet.models import Membership
from coordinator.fleet.verdict_models import VerdictRecord
from coordinator.runs.models import Run
from coordinator.runs.querysets import lookup_for_name

M = TypeVar("M", bound=Model)


class ColumnReader(Generic[M]):
    """Some columns of a model, and its key, in the model's order, for a table alias."""

    def __init__(self, model: type[M], alias: str, *names: str) -> None:
        fields = [
            field
            for field in model._meta.concrete_fields
            if field.primary_key or field.attname in names
        ]
        self.model = model
        self.names = [field.attname for field in fields]
        self.sql = ", ".join(f'{alias}."{field.column}"' for field in fields)
        self._fields = [(field, field.get_db_converters(connection)) for field in fields]

    def read(self, row: Iterator[Any]) -> M:
        """Build an instance from the next values of a row."""
        values = []
        for field, converters in self._fields:
            value = next(row)
            for convert in converters:
                value = convert(value, field, connection)
            values.append(value)
        return self.model.from_db(connection.alias, self.names, values)


@cache
def _machine_query() -> tuple[str, ColumnReader[Machine], ColumnReader[User]]:
    machine = ColumnReader(
        Machine, "m", "key", "owner_id", "hostname", "last_seen", "revoked", "memory_bytes"
    )
    owner = ColumnReader(User, "u", "name", "is_active", "left")
    return (
        f"SELECT {machine.sql}, {owner.sql}, p.since, p.until FROM {Machine._meta.db_table} m "
        f"JOIN {User._meta.db_table} u ON u.id = m.owner_id "
        f"LEFT JOIN {MachinePause._meta.db_table} p ON p.machine_id = m.id "
        "WHERE m.key = %s",
        machine,
        owner,
    )


def machine_for_key(key: str) -> Machine | None:
    """Return the machine with this key, with its owner and its pause."""
    sql, machines, owners = _machine_query()
    row = _fetch_row(sql, key)
    if row is None:
        return None
    machine = machines.read(row)
    machine.owner = owners.read(row)
    since, until = next(row), next(row)
    pause = MachinePause(machine=machine, since=since, until=until) if since else None
    cast(Any, machine._state).fields_cache["pause"] = pause
    return machine


@cache
def _membership_query(column: str) -> tuple[str, ColumnReader[Membership], ColumnReader[Run]]:
    member = ColumnReader(
        Membership,
        "m",
        "run_id",
        "machine_id",
        "high_water_mark",
        "addresses",
        "source_address",
        "ticket_expires",
        "rate",
        "max_tokens_per_second",
    )
    run = ColumnReader(
        Run,
        "r",
        "name",
        "slug",
        "status",
        "owner_id",
        "spec_text",
        "report_every",
        "ledger_tokens",
        "extra_tokens",
    )
    verdicts = VerdictRecord._meta.db_table
    return (
        f"SELECT {member.sql}, {run.sql}, "
        f"EXISTS (SELECT 1 FROM {verdicts} v WHERE v.run_id = r.id) "
        f"FROM {Membership._meta.db_table} m JOIN {Run._meta.db_table} r ON r.id = m.run_id "
        f"WHERE m.machine_id = %s AND m.mirror = '' AND r.{column} = %s",
        member,
        run,
    )


def membership_for_run(machine: Machine, name: str) -> Membership | None:
    """Return a machine's membership in a run of this id or slug, with that run.

    Its `has_verdicts` says whether the run has verdicts.
    """
    lookup = lookup_for_name(name)
    if lookup is None:
        return None
    ((column, value),) = lookup.items()
    sql, members, runs = _membership_query("id" if column == "pk" else column)
    row = _fetch_row(sql, machine.pk, value)
    if row is None:
        return None
    membership = members.read(row)
    membership.run = runs.read(row)
    membership.machine = machine
    membership.has_verdicts = next(row)
    return membership


def _fetch_row(sql: str, *values: Any) -> Iterator[Any] | None:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        row = cursor.fetchone()
    return iter(row) if row else None
