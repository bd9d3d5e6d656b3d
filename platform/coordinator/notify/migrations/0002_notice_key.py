from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("notify", "0001_initial"),
    ]

    operations = [
        migrations.AddIndex(
            model_name="notice", index=models.Index(fields=["key"], name="notice_key")
        ),
    ]
