from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("mirrors", "0005_d_silent")]

    operations = [
        migrations.AddField("standing", "apart", models.DateTimeField(null=True)),
        migrations.AddField("standing", "protocols", models.JSONField(default=list)),
        migrations.AddField("standing", "heads", models.JSONField(default=dict)),
    ]
