"""Test the commands that create an owner and a run."""

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from coordinator.accounts.models import User
from coordinator.runs.models import Run


def test_management_commands_create_an_owner_and_a_run(db, capsys):
    for _ in range(2):
        call_command("prepare_owner", email="Owner@Example.org", password="wooden-barn-9")
    owner = User.objects.get(email="owner@example.org")
    assert owner.check_password("wooden-barn-9")
    assert owner.emailaddress_set.get().verified
    capsys.readouterr()
    fields = ["recipe.learning_rate=2e-3", "model.layers=2"]
    call_command(
        "create_run",
        owner="OWNER@example.org",
        name="Barn",
        tokens="300000",
        fields=fields,
        launch=True,
    )
    run = Run.objects.get(pk=capsys.readouterr().out.strip())
    assert run.launch_requested and run.spec.recipe.token_budget == 300_000
    assert (run.spec.recipe.learning_rate, run.spec.model.layers) == (2e-3, 2)
    with pytest.raises(CommandError, match=r"model\.layers"):
        call_command(
            "create_run", owner="owner@example.org", name="Barn", fields=["model.layers=0"]
        )
    with pytest.raises(CommandError, match="nobody"):
        call_command("create_run", owner="x@example.org", name="Barn")
