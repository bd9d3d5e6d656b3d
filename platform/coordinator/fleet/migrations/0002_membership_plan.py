from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="membership", name="plan", field=models.JSONField(null=True)
        ),
        migrations.AddField(
            model_name="membership", name="step_seconds", field=models.FloatField(null=True)
        ),
    ]
