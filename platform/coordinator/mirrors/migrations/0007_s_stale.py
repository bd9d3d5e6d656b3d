from django.db import migrations, models


class Migration(migrations.Migration):
    """What is not applied yet is not understood: the next `settle` sees to both alike."""

    dependencies = [("mirrors", "0006_p_standing")]

    operations = [
        migrations.RemoveIndex("logevent", "events_not_yet_applied"),
        migrations.RenameField("logevent", "applied", "understood"),
        migrations.AddIndex(
            "logevent",
            models.Index(
                fields=["type"],
                condition=models.Q(accepted=True, understood=False),
                name="events_not_understood",
            ),
        ),
        migrations.AddField("subject", "stale", models.BooleanField(default=False)),
        migrations.AddIndex(
            "subject",
            models.Index(
                fields=["name"], condition=models.Q(stale=True), name="subjects_to_be_folded"
            ),
        ),
    ]
