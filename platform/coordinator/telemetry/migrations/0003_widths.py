from django.db import migrations, models

COARSER = """
INSERT INTO telemetry_rollup (membership_id, width, bucket, reports, rate_sum, tokens, updates_sent, updates_received,
                              peer_bytes_sent, peer_bytes_received)
SELECT membership_id, wide.width, bucket / wide.width * wide.width, sum(reports), sum(rate_sum), sum(tokens),
       sum(updates_sent), sum(updates_received), sum(peer_bytes_sent), sum(peer_bytes_received)
FROM telemetry_rollup, (VALUES (60), (3600)) AS wide (width)
WHERE telemetry_rollup.width = 10
GROUP BY membership_id, wide.width, bucket / wide.width * wide.width
"""


class Migration(migrations.Migration):
    dependencies = [
        ("telemetry", "0002_checkpoints"),
    ]

    operations = [
        migrations.AddField("rollup", "width", models.PositiveSmallIntegerField(default=10)),
        migrations.RemoveConstraint("rollup", "one_rollup_a_bucket"),
        migrations.AddConstraint(
            "rollup",
            models.UniqueConstraint(
                fields=("membership", "width", "bucket"), name="one_rollup_a_bucket"
            ),
        ),
        migrations.AddIndex(
            "rollup", models.Index(fields=["width", "bucket"], name="rollups_by_age")
        ),
        migrations.AddIndex("point", models.Index(fields=["at"], name="points_by_age")),
        migrations.RunSQL(COARSER, "DELETE FROM telemetry_rollup WHERE width <> 10"),
    ]
