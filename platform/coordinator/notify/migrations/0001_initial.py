import django.db.models.deletion
import django.utils.timezone
import uuid6
from django.conf import settings
from django.db import migrations, models

KINDS = [
    ("machine.quiet", "A machine of yours went quiet"),
    ("run.started", "A run of yours, or one your machines are in, started"),
    ("run.stalled", "A run of yours stalled: no machine reports"),
    ("run.finished", "A run of yours, or one your machines are in, ended"),
    ("ticket.refused", "A machine of yours was refused a place in a run"),
]


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Choice",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("kind", models.CharField(choices=KINDS, max_length=20)),
                ("site", models.BooleanField(default=True)),
                ("email", models.BooleanField(default=True)),
                (
                    "person",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="choices",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Notice",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("kind", models.CharField(choices=KINDS, max_length=20)),
                ("key", models.CharField(max_length=160)),
                ("title", models.CharField(max_length=160)),
                ("text", models.CharField(blank=True, max_length=600)),
                ("url", models.CharField(blank=True, max_length=200)),
                ("created", models.DateTimeField(default=django.utils.timezone.now)),
                ("shown", models.BooleanField(default=True)),
                ("read", models.DateTimeField(null=True)),
                ("email_due", models.DateTimeField(null=True)),
                ("email_tries", models.PositiveSmallIntegerField(default=0)),
                ("emailed", models.DateTimeField(null=True)),
                (
                    "person",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="notices",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "indexes": [
                    models.Index(
                        condition=models.Q(("email_due__isnull", False)),
                        fields=["email_due"],
                        name="notice_email_due",
                    ),
                    models.Index(
                        condition=models.Q(("read__isnull", True), ("shown", True)),
                        fields=["person"],
                        name="notice_unread",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Webhook",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("url", models.CharField(max_length=500)),
                ("secret", models.CharField(max_length=60)),
                ("kinds", models.JSONField(default=list)),
                ("active", models.BooleanField(default=True)),
                ("failures", models.PositiveIntegerField(default=0)),
                ("last_answer", models.CharField(blank=True, max_length=200)),
                ("last_tried", models.DateTimeField(null=True)),
                ("created", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "person",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="webhooks",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["created"],
            },
        ),
        migrations.CreateModel(
            name="Delivery",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("body", models.JSONField()),
                ("due", models.DateTimeField(default=django.utils.timezone.now, null=True)),
                ("tries", models.PositiveSmallIntegerField(default=0)),
                ("delivered", models.DateTimeField(null=True)),
                (
                    "notice",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="deliveries",
                        to="notify.notice",
                    ),
                ),
                (
                    "webhook",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="deliveries",
                        to="notify.webhook",
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "indexes": [
                    models.Index(
                        condition=models.Q(("due__isnull", False)),
                        fields=["due"],
                        name="delivery_due",
                    )
                ],
            },
        ),
        migrations.AddConstraint(
            model_name="choice",
            constraint=models.UniqueConstraint(fields=("person", "kind"), name="one_choice_a_kind"),
        ),
        migrations.AddConstraint(
            model_name="notice",
            constraint=models.UniqueConstraint(fields=("person", "key"), name="told_once"),
        ),
        migrations.AddConstraint(
            model_name="delivery",
            constraint=models.UniqueConstraint(fields=("webhook", "notice"), name="owed_once"),
        ),
    ]
