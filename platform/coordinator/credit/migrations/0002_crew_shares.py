import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0001_initial"), ("credit", "0001_initial")]

    operations = [
        migrations.RemoveConstraint(model_name="credit", name="one_range_a_day"),
        migrations.AddField(
            model_name="credit",
            name="lead",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="+",
                to="accounts.machine",
            ),
        ),
        migrations.AddConstraint(
            model_name="credit",
            constraint=models.UniqueConstraint(
                condition=models.Q(("lead", None)),
                fields=("run", "machine", "incarnation", "day"),
                name="one_range_a_day",
            ),
        ),
        migrations.AddConstraint(
            model_name="credit",
            constraint=models.UniqueConstraint(
                fields=("run", "lead", "machine", "incarnation", "day"), name="one_share_a_day"
            ),
        ),
    ]
