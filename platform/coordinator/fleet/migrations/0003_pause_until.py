from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0002_figures")]

    operations = [
        migrations.AddField(
            model_name="machinepause",
            name="until",
            field=models.DateTimeField(null=True),
        ),
    ]
