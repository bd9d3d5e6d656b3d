"""Test that the memberships of a deployed site survive its upgrade."""

from collections.abc import Iterator

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from helpers.paths import GOLDEN

from barnraise.protocol.coordinator_messages import Reports
from coordinator.fleet.models import Membership

REPORT = Reports.model_validate_json((GOLDEN / "reports.json").read_text()).reports[0]
MOVED = ("step", "peers", "vector", "anchor", "plan", "step_seconds")


def migrate_fleet(name: str = "") -> None:
    """Bring the tables of the app to a migration; "" for the newest."""
    executor = MigrationExecutor(connection)
    executor.migrate([("fleet", name)] if name else executor.loader.graph.leaf_nodes("fleet"))


@pytest.fixture
def first_tables(transactional_db) -> Iterator[None]:
    """Provide the tables of the app's first migration during a test."""
    migrate_fleet("0001_initial")
    yield
    migrate_fleet()


@pytest.mark.parametrize("has_reported", [True, False])
def test_upgrade_to_one_column_of_figures_loses_nothing(
    first_tables, person, volunteer, draft, has_reported
):
    owner = person()
    machine, run = volunteer(owner).machine, draft(owner)
    figures = REPORT.model_dump(mode="json")
    columns = {"run_id": run.pk, "machine_id": machine.pk, "version": "9"}
    if has_reported:
        names = (*MOVED, "tokens", "ledger_tokens", "rate", "exchange", "incarnation")
        columns |= {name: figures[name] for name in names}
        columns |= {"latest": 5, "high_water_mark": 4, "planned": 7, "changed": 8}
    before = MigrationExecutor(connection).loader.project_state(("fleet", "0001_initial")).apps
    before.get_model("fleet", "Membership").objects.create(**columns)
    migrate_fleet()
    after = Membership.objects.get()
    values = {name: getattr(after, name, None) for name in columns} | after.all_figures
    assert values["version"] == "9"
    if has_reported:
        assert {name: values[name] for name in columns} == columns
    else:
        assert (values["step"], values["plan"], values["anchor"]) == (0, None, None)
