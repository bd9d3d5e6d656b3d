from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="runevent",
            name="reason",
            field=models.CharField(blank=True, db_default="", default="", max_length=20),
        ),
        migrations.AddField(
            model_name="machinecondition",
            name="pause_sentence",
            field=models.CharField(blank=True, db_default="", default="", max_length=100),
        ),
    ]
