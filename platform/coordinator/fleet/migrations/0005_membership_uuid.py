"""A membership's key becomes a UUIDv7, made of the time it began: nothing that mirrors may tell each other depends on a
local sequence. Rows stay, and so do the sums, losses and receipts that point at them."""

import uuid6
from django.db import migrations, models

CHILDREN = ("Rollup", "Point", "Receipt")
MADE = """
    (lpad(to_hex((extract(epoch FROM joined) * 1000)::bigint), 12, '0') || '7' || substr(md5(random()::text), 1, 3)
     || substr('89ab', 1 + floor(random() * 4)::int, 1) || substr(md5(random()::text || id::text), 1, 15))::uuid
"""


def renumber(apps, editor):
    member, table = apps.get_model("fleet", "Membership"), "fleet_membership"
    editor.execute(
        "SET CONSTRAINTS ALL IMMEDIATE"
    )  # nothing may be left to check when tables are altered
    editor.execute(f"ALTER TABLE {table} ADD COLUMN fresh uuid")
    editor.execute(f"UPDATE {table} SET fresh = {MADE}")
    for name in CHILDREN:
        child = apps.get_model("telemetry", name)._meta.db_table
        editor.execute(f"ALTER TABLE {child} ADD COLUMN fresh uuid")
        editor.execute(
            f"UPDATE {child} SET fresh = m.fresh FROM {table} m WHERE m.id = membership_id"
        )
        editor.execute(f"ALTER TABLE {child} DROP COLUMN membership_id")  # and what was built on it
        editor.execute(f"ALTER TABLE {child} RENAME COLUMN fresh TO membership_id")
        editor.execute(f"ALTER TABLE {child} ALTER COLUMN membership_id SET NOT NULL")
    editor.execute(f"ALTER TABLE {table} DROP COLUMN id")
    editor.execute(f"ALTER TABLE {table} RENAME COLUMN fresh TO id")
    editor.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
    for name in CHILDREN:
        model = apps.get_model("telemetry", name)
        child = model._meta.db_table
        editor.execute(
            f"ALTER TABLE {child} ADD CONSTRAINT {child}_of_membership FOREIGN KEY (membership_id) "
            f"REFERENCES {table} (id) DEFERRABLE INITIALLY DEFERRED"
        )
        editor.execute(f"CREATE INDEX {child}_membership ON {child} (membership_id)")
        for constraint in model._meta.constraints:
            if "membership" in constraint.fields:
                editor.add_constraint(model, constraint)
        for index in model._meta.indexes:
            if "membership" in index.fields:
                editor.add_index(model, index)
    assert member._meta.db_table == table


class Migration(migrations.Migration):
    dependencies = [("fleet", "0004_rest_measured"), ("telemetry", "0004_credit")]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunPython(renumber)],
            state_operations=[
                migrations.AlterField(
                    model_name="membership",
                    name="id",
                    field=models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                )
            ],
        )
    ]
