import django.db.models.deletion
import django.utils.timezone
import uuid6
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0001_initial"),
        ("runs", "0002_terms_invitations"),
        ("telemetry", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Checkpoint",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("tokens", models.BigIntegerField()),
                ("vector", models.CharField(max_length=64)),
                ("digest", models.CharField(max_length=64)),
                ("checksum", models.CharField(max_length=16)),
                ("size", models.BigIntegerField()),
                ("announced", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="checkpoints",
                        to="runs.run",
                    ),
                ),
            ],
            options={
                "ordering": ["-tokens", "-id"],
                "indexes": [models.Index(fields=["run", "-tokens"], name="checkpoints_of_a_run")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("run", "vector", "digest"), name="one_checkpoint_a_digest"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Holding",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("said", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "checkpoint",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="holdings",
                        to="telemetry.checkpoint",
                    ),
                ),
                (
                    "machine",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="accounts.machine",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("checkpoint", "machine"), name="one_holding_a_machine"
                    )
                ],
            },
        ),
    ]
