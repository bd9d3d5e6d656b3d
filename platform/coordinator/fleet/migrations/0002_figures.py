from django.db import migrations, models

# A site that goes back to the first migration has these figures again with the next reports.
MOVE_FIGURES = """
    UPDATE fleet_membership SET figures = jsonb_build_object(
        'step', step,
        'peers', peers,
        'vector', coalesce(nullif(vector, ''), repeat('0', 64)),
        'anchor', nullif(anchor, ''),
        'plan', plan,
        'step_seconds', step_seconds
    )
"""


class Migration(migrations.Migration):
    dependencies = [("fleet", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="membership",
            name="figures",
            field=models.JSONField(default=dict),
        ),
        migrations.AddField(
            model_name="membership",
            name="report_interval",
            field=models.FloatField(db_default=0, default=0),
        ),
        migrations.RunSQL(MOVE_FIGURES, migrations.RunSQL.noop),
        *(
            migrations.RemoveField(model_name="membership", name=name)
            for name in ("step", "peers", "vector", "anchor", "plan", "step_seconds")
        ),
    ]
