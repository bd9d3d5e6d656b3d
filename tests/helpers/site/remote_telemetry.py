"""Build the telemetry that another mirror would send, and store it."""

from barnraise.protocol import reports as reports_module
from coordinator.telemetry.models import RemoteCursor
from coordinator.telemetry.remote import ingest
from coordinator.telemetry.remote.protocol import MachineRow, TelemetryPage, TelemetryPosition

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


def membership_row(**changed) -> MachineRow:
    """Build the newest figures of the page's first machine; `changed` replaces fields."""
    fields = {
        "machine_index": 0,
        "age": 1.0,
        "latest": 9,
        "high_water_mark": 9,
        "activity": "training",
        "version": "0.1",
        "incarnation": "a" * 16,
        "step": 90,
        "tokens": 9000,
        "ledger_tokens": 9000,
        "rate": 700.0,
        "updates_sent": 9,
        "updates_received": 0,
        "peers": 0,
        "vector": "c" * 64,
        "anchor": None,
        "has_final_checkpoint": False,
        "step_seconds": None,
        "exchange": None,
    }
    return MachineRow(**{**fields, **changed})


def page(*machines, **rows) -> TelemetryPage:
    """Build a page of telemetry.

    Args:
        machines: The run and the key of each machine; see `elsewhere`.
        rows: Fields that are not empty, such as `memberships`.
    """
    empty = {
        "memberships": [],
        "rollups": [],
        "points": [],
        "events": [],
        "position": TelemetryPosition(),
        "more": False,
    }
    return TelemetryPage(machines=list(machines), **{**empty, **rows})


def ingest_page(
    received: TelemetryPage, key: str = OTHER, after: TelemetryPosition | None = None
) -> ingest.PageIngestResult:
    """Store a page of a mirror.

    Args:
        received: The page.
        key: The mirror's key.
        after: The position that this site requested it after; None for the newest that it stored.
    """
    cursor, _ = RemoteCursor.objects.get_or_create(key=key)
    return ingest.store_page(key, after or cursor.position, received)


def elsewhere(run, volunteer) -> tuple[str, str]:
    """Return the run and the key of a machine that reports to another mirror."""
    return str(run.pk), volunteer.machine.key
