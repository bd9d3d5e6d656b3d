"""What another mirror tells of machines, by hand, and how it is taken."""

from barnraise.protocol import reports as reports_module
from coordinator.telemetry.models import RemoteCursor
from coordinator.telemetry.remote import ingest
from coordinator.telemetry.remote.protocol import MachineRow, TelemetryPage, TelemetryPosition
from coordinator.telemetry.rollup import drain_queue

OTHER = "b" * 64
EXCHANGE = reports_module.ExchangeView(
    round_steps=10,
    scheme="dense4",
    density=1.0,
    bits_per_parameter=4.0,
    sent_rate=1e3,
    received_rate=1e3,
    uplink_rate=0.0,
    lag=0,
)


def report(volunteer, run, *reports) -> None:
    answer = volunteer.report(run, *reports)
    assert answer.status_code == 200, answer.content
    drain_queue(wait=True)


def frame(**said) -> MachineRow:
    """Of the page's first machine."""
    plausible = {
        "of": 0, "age": 1.0, "latest": 9, "mark": 9, "activity": "training", "version": "0.1",
        "incarnation": "a" * 16, "step": 90, "tokens": 9000, "ledger_tokens": 9000, "rate": 700.0, "updates_sent": 9,
        "updates_received": 0, "peers": 0, "vector": "c" * 64, "anchor": None, "safe": False, "step_seconds": None,
        "exchange": None,
    }  # fmt: skip
    return MachineRow(**{**plausible, **said})


def page(*machines, **rows) -> TelemetryPage:
    """What a mirror may tell; `machines`: (run, key) each."""
    empty = {
        "frames": [],
        "sums": [],
        "points": [],
        "events": [],
        "places": TelemetryPosition(),
        "more": False,
    }
    return TelemetryPage(machines=list(machines), **{**empty, **rows})


def ingest_page(
    found: TelemetryPage, key: str = OTHER, after: TelemetryPosition | None = None
) -> ingest.PageIngestResult:
    """Taken, as from a mirror that was asked past `after`, or past where it was heard last."""
    ear, _ = RemoteCursor.objects.get_or_create(key=key)
    return ingest.store_page(key, after or ear.position, found)


def elsewhere(run, volunteer) -> tuple[str, str]:
    return str(run.pk), volunteer.machine.key
