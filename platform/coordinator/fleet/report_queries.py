"""Who asks, and their part in a run: the two statements behind every report, written by hand.

Thousands come in a minute, and putting these together anew each time was two fifths of what a report cost. What comes
of them are models with those columns alone; another one that is looked at is read then.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Generic, TypeVar

from django.db import connection
from django.db.models import Model

from coordinator.accounts.models import Machine, User
from coordinator.fleet.machine_state import MachinePause
from coordinator.fleet.models import Membership
from coordinator.fleet.verdicts import VerdictRecord
from coordinator.runs.models import Run
from coordinator.runs.querysets import lookup_for_name

M = TypeVar("M", bound=Model)


class ColumnReader(Generic[M]):
    """The named columns of a model and its key, in the model's order; `sql` calls the table `alias`."""

    def __init__(self, model: type[M], alias: str, *names: str):
        fields = [
            each
            for each in model._meta.concrete_fields
            if each.primary_key or each.attname in names
        ]
        self.model, self.names = model, [each.attname for each in fields]
        self.sql = ", ".join(f'{alias}."{each.column}"' for each in fields)
        self._fields = [(each, each.get_db_converters(connection)) for each in fields]

    def read(self, row: Iterator[Any]) -> M:
        """From the next values of a row."""
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
        f"SELECT {machine.sql}, {owner.sql}, r.since FROM {Machine._meta.db_table} m "
        f"JOIN {User._meta.db_table} u ON u.id = m.owner_id LEFT JOIN {MachinePause._meta.db_table} r ON r.machine_id = m.id "
        "WHERE m.key = %s",
        machine,
        owner,
    )


def machine_for_key(key: str) -> Machine | None:
    """The machine of this key, with its owner and whether it rests."""
    sql, machines, owners = _machine_query()
    if (row := _row(sql, key)) is None:
        return None
    found, found.owner = machines.read(row), owners.read(row)
    since = next(row)
    found._state.fields_cache["pause"] = MachinePause(machine=found, since=since) if since else None
    return found


@cache
def _membership_query(column: str) -> tuple[str, ColumnReader[Membership], ColumnReader[Run]]:
    member = ColumnReader(
        Membership, "m", "run_id", "machine_id", "mark", "addresses", "ticket_expires"
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
    return (
        f"SELECT {member.sql}, {run.sql}, "
        f"EXISTS (SELECT 1 FROM {VerdictRecord._meta.db_table} v WHERE v.run_id = r.id AND v.proven) "
        f"FROM {Membership._meta.db_table} m JOIN {Run._meta.db_table} r ON r.id = m.run_id "
        f"WHERE m.machine_id = %s AND m.mirror = '' AND r.{column} = %s",
        member,
        run,
    )


def membership_for_run(machine: Machine, name: str) -> Membership | None:
    """A machine's part in the run of this id or slug, with that run, and whether there are verdicts (`judged`)."""
    if (named := lookup_for_name(name)) is None:
        return None
    ((column, value),) = named.items()
    sql, members, runs = _membership_query("id" if column == "pk" else column)
    if (row := _row(sql, machine.pk, value)) is None:
        return None
    found, found.run = members.read(row), runs.read(row)
    found.machine, found.judged = machine, next(row)
    return found


def _row(sql: str, *values: object) -> Iterator[Any] | None:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        row = cursor.fetchone()
    return iter(row) if row else None
