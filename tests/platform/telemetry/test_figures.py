"""A new figure of a machine is added in one place, and is then in every shape but the page's."""

import pytest
from helpers.site.remote_telemetry import EXCHANGE

from barnraise.protocol.reports import MachineFigures, Report
from barnraise.training.local_status import LocalStatus
from coordinator.fleet.models import FIGURE_COLUMNS, Membership
from coordinator.lib.valkey import valkey_client
from coordinator.live.live_messages import LiveMachine
from coordinator.telemetry import report_queue
from coordinator.telemetry.remote.export import build_page
from coordinator.telemetry.remote.protocol import MachineRow, TelemetryPosition
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.run_table import machine_rows

# What the page of a run shows of a machine besides figures.
OTHER_LIVE_FIELDS = {"id", "name", "person", "alive", "last_seen", "agrees"}


@pytest.fixture
def reported(adas_run, numbered_report, plan):
    """Return a run, and the figures that a machine has reported in it."""
    run, machine = adas_run
    changes = {"plan": plan, "step_seconds": 1.5, "exchange": EXCHANGE, "anchor": "c" * 64}
    report = numbered_report(1, learning_rate=0.5, gradient_norm=2.0, **changes)
    assert machine.report(run, report).status_code == 200
    return run, report.model_dump(mode="json", include={*MachineFigures.model_fields})


@pytest.mark.parametrize("shape", [Report, LocalStatus, MachineRow])
def test_every_figure_is_in_each_message(shape):
    assert issubclass(shape, MachineFigures)
    assert shape.model_fields.keys() >= MachineFigures.model_fields.keys()


def test_every_figure_is_shown_live_stored_and_sent_to_mirrors(reported):
    run, figures = reported
    (live,) = report_queue.live_rows(run.pk).values()
    (live_row,) = machine_rows(run)
    assert figures.items() <= live.items() and figures.items() <= live_row.items()
    drain_queue(wait=True)
    valkey_client().flushdb()  # Postgres alone has them now
    (stored_row,) = machine_rows(run)
    assert figures.items() <= stored_row.items() and stored_row.keys() == live_row.keys()
    (sent,) = build_page(TelemetryPosition()).memberships
    assert figures.items() <= sent.model_dump(mode="json").items()


def test_page_of_a_run_shows_figures_under_their_names():
    assert LiveMachine.model_fields.keys() - OTHER_LIVE_FIELDS <= MachineFigures.model_fields.keys()


def test_figures_that_queries_use_have_a_column():
    assert {"activity", "tokens", "ledger_tokens", "rate", "exchange"} <= FIGURE_COLUMNS
    assert {field.name for field in Membership._meta.concrete_fields} >= FIGURE_COLUMNS
