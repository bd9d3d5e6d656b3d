import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0007_live_elsewhere"),
        ("telemetry", "0007_told"),
    ]

    operations = [
        migrations.CreateModel(
            name="Ear",
            fields=[
                ("key", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("after", models.JSONField(default=dict)),
                ("tried", models.DateTimeField(default=django.utils.timezone.now)),
                ("heard", models.DateTimeField(null=True)),
                ("failures", models.PositiveSmallIntegerField(default=0)),
                ("waits", models.DateTimeField(null=True)),
                ("why", models.CharField(blank=True, max_length=300)),
            ],
        ),
        migrations.AddField(
            "event",
            "mirror",
            models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        *(
            operation
            for model, index in (
                ("event", "events_to_tell"),
                ("rollup", "rollups_to_tell"),
                ("point", "points_to_tell"),
            )
            for operation in (
                migrations.AddField(
                    model, "changed", models.BigIntegerField(db_default=0, default=0, null=True)
                ),
                migrations.AddIndex(
                    model,
                    models.Index(
                        condition=models.Q(("changed__isnull", False)),
                        fields=["changed", "id"],
                        name=index,
                    ),
                ),
            )
        ),
    ]
