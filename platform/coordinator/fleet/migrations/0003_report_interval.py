from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0002_figures")]

    operations = [
        migrations.AddField(
            model_name="membership",
            name="report_interval",
            field=models.FloatField(db_default=0, default=0),
        ),
    ]
