from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("runs", "0002_terms_invitations"),
    ]

    operations = [
        migrations.AddField(
            model_name="run",
            name="extra_tokens",
            field=models.BigIntegerField(default=0, editable=False),
        ),
    ]
