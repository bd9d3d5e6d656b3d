import django.db.models.deletion
import django.utils.timezone
import uuid6
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Announcement",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("text", models.CharField(max_length=300)),
                (
                    "tone",
                    models.CharField(
                        choices=[("news", "News"), ("warning", "Warning"), ("trouble", "Trouble")],
                        default="news",
                        max_length=10,
                    ),
                ),
                ("starts", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "ends",
                    models.DateTimeField(
                        blank=True, help_text="Empty: until it is withdrawn.", null=True
                    ),
                ),
                (
                    "by",
                    models.ForeignKey(
                        editable=False,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["-starts"],
            },
        ),
    ]
