import uuid

import django.db.models.deletion
import django.db.models.functions.text
import django.utils.timezone
import uuid6
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="user",
            name="organiser",
            field=models.BooleanField(
                default=False, help_text="May create runs where the staff grant that."
            ),
        ),
        migrations.AddField(
            model_name="user",
            name="ban_reason",
            field=models.CharField(blank=True, max_length=300),
        ),
        migrations.AddField(
            model_name="user",
            name="banned",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="user",
            name="left",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="machine",
            name="revoked_reason",
            field=models.CharField(blank=True, max_length=300),
        ),
        migrations.CreateModel(
            name="SiteRules",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid.UUID(int=0), editable=False, primary_key=True, serialize=False
                    ),
                ),
                (
                    "organisers",
                    models.CharField(
                        choices=[
                            ("everybody", "Everybody who has an account"),
                            ("granted", "Those whom the staff made organisers"),
                        ],
                        default="everybody",
                        max_length=10,
                        verbose_name="who may create runs",
                    ),
                ),
            ],
            options={
                "verbose_name": "site rules",
                "verbose_name_plural": "site rules",
            },
        ),
        migrations.CreateModel(
            name="Team",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("slug", models.SlugField(editable=False, max_length=80, unique=True)),
                ("name", models.CharField(max_length=60)),
                (
                    "created",
                    models.DateTimeField(default=django.utils.timezone.now, editable=False),
                ),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="TeamMember",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("leads", models.BooleanField(default=False)),
                ("joined", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "person",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="team_places",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "team",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="members",
                        to="accounts.team",
                    ),
                ),
            ],
            options={
                "ordering": ["joined", "pk"],
            },
        ),
        migrations.AddField(
            model_name="team",
            name="people",
            field=models.ManyToManyField(
                related_name="teams", through="accounts.TeamMember", to=settings.AUTH_USER_MODEL
            ),
        ),
        migrations.CreateModel(
            name="Invitation",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid6.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("email", models.EmailField(max_length=254)),
                ("token_digest", models.CharField(editable=False, max_length=64, unique=True)),
                ("created", models.DateTimeField(default=django.utils.timezone.now)),
                ("expires", models.DateTimeField()),
                (
                    "by",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "team",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="invitations",
                        to="accounts.team",
                    ),
                ),
            ],
            options={
                "ordering": ["-created"],
            },
        ),
        migrations.AddConstraint(
            model_name="team",
            constraint=models.UniqueConstraint(
                django.db.models.functions.text.Lower("name"), name="one_team_a_name"
            ),
        ),
        migrations.AddConstraint(
            model_name="teammember",
            constraint=models.UniqueConstraint(fields=("team", "person"), name="one_place_a_team"),
        ),
        migrations.AddConstraint(
            model_name="invitation",
            constraint=models.UniqueConstraint(
                models.F("team"),
                django.db.models.functions.text.Lower("email"),
                name="one_invitation_an_address",
            ),
        ),
    ]
