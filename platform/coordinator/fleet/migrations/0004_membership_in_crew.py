from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0003_pause_until")]

    operations = [
        migrations.AddField(
            model_name="membership",
            name="in_crew",
            field=models.BooleanField(db_default=False, default=False),
        ),
    ]
