from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0002_people")]

    operations = [
        migrations.AddIndex(
            model_name="machine",
            index=models.Index(
                condition=models.Q(("revoked__isnull", False)),
                fields=["revoked"],
                name="machine_revoked",
            ),
        ),
    ]
