"""Compare the tables of the database with the migrations that it says were applied.

A migration that was edited after it was applied changes the code and not the database; every check
that reads names of migrations finds such a database in order.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from django.core.management import CommandError
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.state import ProjectState

COLUMNS = """
    SELECT table_name, column_name, is_nullable = 'NO' AND column_default IS NULL
        AND is_identity = 'NO'
    FROM information_schema.columns WHERE table_schema = current_schema()"""
# With the columns of unique indexes of whole columns, which also enforce constraints.
INDEXES = """
    SELECT t.relname, i.relname, CASE WHEN x.indisunique AND x.indpred IS NULL THEN
        (SELECT array_agg(a.attname::text) FROM pg_attribute a
         WHERE a.attrelid = t.oid AND a.attnum = ANY (x.indkey)) END
    FROM pg_index x JOIN pg_class t ON t.oid = x.indrelid JOIN pg_class i ON i.oid = x.indexrelid
    WHERE t.relnamespace = current_schema()::regnamespace"""
CONSTRAINTS = """
    SELECT t.relname, c.conname FROM pg_constraint c JOIN pg_class t ON t.oid = c.conrelid
    WHERE t.relnamespace = current_schema()::regnamespace"""

_matched = False  # Whether this process has found the tables to be right.


@dataclass
class Table:
    """What the database has of a table."""

    columns: set[str] = field(default_factory=set[str])
    required: set[str] = field(default_factory=set[str])  # columns that every insertion must set
    names: set[str] = field(default_factory=set[str])  # of indexes and constraints
    unique: set[frozenset[str]] = field(default_factory=set[frozenset[str]])  # sets of columns


class DatabaseSchema:
    """The migrations of the code, those that the database names, and its tables."""

    def __init__(self) -> None:
        """Read what the database names.

        Raises:
            DatabaseError: The database does not answer.
        """
        self._executor = MigrationExecutor(connection)
        self._targets = self._executor.loader.graph.leaf_nodes()

    def count_missing_migrations(self) -> int:
        """Count the migrations that are not applied."""
        return len(self._executor.migration_plan(self._targets))

    def find_difference(self) -> str:
        """Return what the tables lack of the applied migrations, in a sentence; "" if nothing.

        Raises:
            DatabaseError: The database does not answer.
        """
        difference = next(compare_tables(self._applied_models(), _read_tables()), "")
        return difference and (
            f"{difference}: other code made this database; see docs/operate.md#upgrade"
        )

    def _applied_models(self) -> list[Any]:
        """Return the models as the applied migrations leave them."""
        state = ProjectState()
        for migration, _ in self._executor.migration_plan(self._targets, clean_start=True):
            if (migration.app_label, migration.name) in self._executor.loader.applied_migrations:
                migration.mutate_state(state, preserve=False)
        return state.apps.get_models(include_auto_created=True)


def compare_tables(models: Iterable[Any], tables: dict[str, Table]) -> Iterator[str]:
    """Yield what the tables lack of the models, or have that the models do not know. Pure."""
    for options in sorted((model._meta for model in models), key=lambda options: options.db_table):
        if not options.managed or options.proxy:
            continue
        name = options.db_table
        if name not in tables:
            yield f"The database lacks the table {name}"
            continue
        table, fields = tables[name], options.local_concrete_fields
        columns = {column.column for column in fields}
        for column in sorted(columns - table.columns):
            yield f"The table {name} lacks the column {column}"
        for column in sorted(table.required - columns):
            yield f"The table {name} requires the unknown column {column}"
        for part in sorted({part.name for part in (*options.constraints, *options.indexes)}):
            if part not in table.names:
                yield f"The table {name} lacks the index or constraint {part}"
        for column in fields:
            if column.unique and frozenset([column.column]) not in table.unique:
                yield f"The table {name} lacks a unique index of {column.column}"


def describe_schema_problem() -> str:
    """Return what the database lacks and what to do; "" if nothing.

    Once its tables are right, a process compares only the names of migrations.

    Raises:
        DatabaseError: The database does not answer.
    """
    global _matched
    schema = DatabaseSchema()
    if missing := schema.count_missing_migrations():
        return f"{missing} migrations are not applied: run manage.py migrate"
    difference = "" if _matched else schema.find_difference()
    _matched = not difference
    return difference


def forget() -> None:
    """Let this process compare the tables again."""
    global _matched
    _matched = False


def refuse_other_schema(**kwargs: Any) -> None:
    """Refuse to migrate a database whose tables are not those of its applied migrations."""
    if difference := DatabaseSchema().find_difference():
        raise CommandError(difference)


def _read_tables() -> dict[str, Table]:
    tables: defaultdict[str, Table] = defaultdict(Table)
    with connection.cursor() as cursor:
        cursor.execute(COLUMNS)
        for table, column, is_required in cursor.fetchall():
            tables[table].columns.add(column)
            if is_required:
                tables[table].required.add(column)
        cursor.execute(INDEXES)
        for table, index, unique_columns in cursor.fetchall():
            tables[table].names.add(index)
            if unique_columns:
                tables[table].unique.add(frozenset(unique_columns))
        cursor.execute(CONSTRAINTS)
        for table, constraint in cursor.fetchall():
            tables[table].names.add(constraint)
    return dict(tables)
