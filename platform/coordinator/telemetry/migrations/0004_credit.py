import django.db.models.deletion
import uuid6
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0002_people"),
        ("runs", "0002_terms_invitations"),
        ("telemetry", "0003_widths"),
    ]

    operations = [
        migrations.CreateModel(
            name="Credit",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("incarnation", models.CharField(max_length=16)),
                ("day", models.DateField()),
                ("first", models.BigIntegerField()),
                ("last", models.BigIntegerField()),
                ("tokens", models.BigIntegerField()),
                (
                    "machine",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="credits",
                        to="accounts.machine",
                    ),
                ),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="credits",
                        to="runs.run",
                    ),
                ),
                (
                    "witness",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accounts.machine",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["machine", "day"], name="credit_of_a_machine"),
                    models.Index(fields=["day"], name="credit_by_day"),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("run", "machine", "incarnation", "day"), name="one_range_a_day"
                    )
                ],
            },
        ),
    ]
