from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0002_membership_plan"),
    ]

    operations = [
        migrations.AddField(
            model_name="membership", name="trade", field=models.JSONField(null=True)
        ),
    ]
