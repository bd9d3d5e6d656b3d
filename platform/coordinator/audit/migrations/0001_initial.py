import django.core.serializers.json
import django.db.models.deletion
import django.utils.timezone
import uuid6
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("accounts", "0001_initial"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Entry",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("at", models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ("action", models.CharField(db_index=True, max_length=60)),
                ("subject_kind", models.CharField(max_length=30)),
                ("subject_id", models.CharField(max_length=64)),
                ("subject_name", models.CharField(blank=True, max_length=200)),
                (
                    "detail",
                    models.JSONField(
                        blank=True,
                        default=dict,
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                    ),
                ),
                ("request_id", models.CharField(blank=True, db_index=True, max_length=64)),
                (
                    "actor",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "machine",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accounts.machine",
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "verbose_name_plural": "entries",
                "indexes": [
                    models.Index(fields=["subject_kind", "subject_id"], name="audit_entry_subject")
                ],
            },
        ),
    ]
