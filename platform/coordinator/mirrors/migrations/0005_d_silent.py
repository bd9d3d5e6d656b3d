from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("mirrors", "0004_l_lists")]

    operations = [
        migrations.AddField(
            model_name="standing",
            name="silent",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AddField(
            model_name="clock", name="steady", field=models.FloatField(db_default=0, default=0)
        ),
        migrations.AddField(
            model_name="clock",
            name="boot",
            field=models.CharField(blank=True, db_default="", default="", max_length=36),
        ),
    ]
