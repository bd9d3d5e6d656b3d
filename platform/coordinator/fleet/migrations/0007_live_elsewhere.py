from datetime import UTC, datetime

from django.db import migrations, models

NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0006_verdicts"),
    ]

    operations = [
        migrations.AddField(
            "membership",
            "mirror",
            models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.AddField(
            "membership", "heard", models.DateTimeField(db_default=NEVER, default=NEVER)
        ),
        migrations.AddField(
            "membership", "changed", models.BigIntegerField(db_default=0, default=0, null=True)
        ),
        migrations.AddField(
            "membership", "planned", models.BigIntegerField(db_default=0, default=0)
        ),
        migrations.RemoveConstraint("membership", "one_membership_a_run"),
        migrations.AddConstraint(
            "membership",
            models.UniqueConstraint(
                fields=("run", "machine", "mirror"), name="one_membership_a_mirror"
            ),
        ),
        migrations.AddIndex(
            "membership",
            models.Index(
                condition=models.Q(("changed__isnull", False)),
                fields=["changed", "id"],
                name="memberships_to_tell",
            ),
        ),
        migrations.RunSQL(
            "UPDATE fleet_membership SET heard = last_seen WHERE latest > 0", migrations.RunSQL.noop
        ),
    ]
