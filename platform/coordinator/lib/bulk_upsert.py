"""Insert or update many rows in one statement."""

import json
from collections.abc import Sequence

from django.db import connection, models


def bulk_upsert(rows: Sequence[models.Model], update: Sequence[str] = ()) -> None:
    """Insert rows of one model with all their columns.

    The rows travel as one JSON text, because `bulk_create` quotes every field by itself and takes
    twice as long.

    Args:
        rows: Instances of one model.
        update: Columns to overwrite if a row with the same primary key exists; without any, such a
            row is left alone.
    """
    if not rows:
        return
    meta = rows[0]._meta
    assert meta.pk is not None  # every stored model has a primary key
    fields = meta.concrete_fields
    columns = ", ".join(f'"{field.column}"' for field in fields)
    typed_columns = ", ".join(f'"{field.column}" {field.db_type(connection)}' for field in fields)
    assignments = ", ".join(f'"{name}" = excluded."{name}"' for name in update)
    on_conflict = f"DO UPDATE SET {assignments}" if assignments else "DO NOTHING"
    records = [{field.column: getattr(row, field.attname) for field in fields} for row in rows]
    with connection.cursor() as cursor:
        cursor.execute(
            f'INSERT INTO "{meta.db_table}" ({columns}) '
            f"SELECT {columns} FROM json_to_recordset(%s::json) AS records({typed_columns}) "
            f'ON CONFLICT ("{meta.pk.column}") {on_conflict}',
            [json.dumps(records, ensure_ascii=False, default=str)],
        )
