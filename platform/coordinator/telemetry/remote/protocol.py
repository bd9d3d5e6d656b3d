"""Messages by which mirrors exchange figures of their machines, outside the event log.

A page contains what has changed since a position that the requesting mirror names. Rows are
absolute, so a page that arrives twice changes nothing.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator

from barnraise.protocol.coordinator_messages import SignedHeader, SignedStatement
from barnraise.protocol.enums import PauseReason
from barnraise.protocol.messages import Signed
from barnraise.protocol.reports import MachineFigures
from barnraise.protocol.types import (
    Count,
    Digest,
    DocumentText,
    Id,
    Loss,
    Message,
    PublicKey,
    Rate,
    Seconds,
    UnixTime,
)
from coordinator.fleet.models import MAX_INTERVAL_SECONDS

MAX_MACHINE_ROWS, MAX_ROLLUPS, MAX_LOSSES, MAX_EVENTS = 200, 2000, 2000, 200  # of one page
MAX_WITNESS_ROWS = 100  # of one page, each with two signed documents of at most 62 kB
WITNESS_BYTES = 1 << 20  # of a page's witness rows, approximately
PAGE_BYTES = 4 << 20  # of its text; such pages have half of that at most
MACHINES = MAX_MACHINE_ROWS + MAX_ROLLUPS + MAX_LOSSES + MAX_EVENTS + MAX_WITNESS_ROWS

Seq = Annotated[int, Field(ge=0, lt=1 << 53)]
MachineIndex = Annotated[int, Field(ge=0, lt=MACHINES)]  # of the page's `machines`


class RowPosition(NamedTuple):
    """The position of a row in the order of (change stamp, id)."""

    changed: Seq = 0
    id: Annotated[str, Field(pattern=r"^([0-9]{1,19}|[0-9a-f-]{36})$")] | None = None


class TelemetryPosition(Message):
    """Positions of the last rows received, one for each kind of row."""

    memberships: RowPosition = RowPosition()
    rollups: RowPosition = RowPosition()
    points: RowPosition = RowPosition()
    events: RowPosition = RowPosition()
    witnesses: RowPosition = RowPosition()


Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class TelemetryRequest(Message):
    """A request for the rows after a position.

    `nonce` is random, so that no older reply passes for the reply to this request.
    """

    after: TelemetryPosition = TelemetryPosition()
    nonce: Nonce


class MachineRow(MachineFigures):
    """A machine's newest report in a run.

    `age` is how long ago it arrived, because mirrors' clocks differ. `high_water_mark`: all
    reports up to this number are stored there. `has_final_checkpoint`: the machine reported that
    it holds the final weights. `plan` is set only if it changed after the requested position.
    """

    machine_index: MachineIndex
    age: Seconds
    latest: Seq
    high_water_mark: Seq
    has_final_checkpoint: bool
    # Seconds from that report to the next one, as the mirror answered. Older mirrors do not send
    # this, nor the two figures below it.
    report_interval: float = Field(default=0.0, ge=0, le=MAX_INTERVAL_SECONDS)
    peer_bytes_sent: Count = 0
    peer_bytes_received: Count = 0


class RollupRow(NamedTuple):
    """A row of `models.Rollup`."""

    machine_index: MachineIndex
    width: Literal[10, 60, 3600]
    bucket: Annotated[int, Field(ge=0, lt=1 << 36)]
    reports: Annotated[int, Field(ge=1, lt=1 << 31)]
    rate_sum: Annotated[float, Field(ge=0, lt=1e24, allow_inf_nan=False)]
    tokens: Count
    updates_sent: Count
    updates_received: Count
    peer_bytes_sent: Count
    peer_bytes_received: Count
    lag_sum: Count = 0


class LossRow(NamedTuple):
    """A measured loss, at a position in report `seq`."""

    machine_index: MachineIndex
    seq: Seq
    position: Annotated[int, Field(ge=0, lt=64)]
    kind: Literal["train", "validation"]
    tokens: Count
    loss: Loss
    at: UnixTime
    learning_rate: Rate | None = None
    gradient_norm: Rate | None = None


class EventRow(NamedTuple):
    """A machine joined, paused, resumed, finished or left."""

    machine_index: MachineIndex
    id: Id
    kind: Literal["joined", "paused", "resumed", "finished", "left"]
    at: UnixTime
    reason: PauseReason | Literal[""] = ""  # of a pause


class WitnessRow(NamedTuple):
    """A machine witnessed an author's updates: the two signed parts of an `Attestation`.

    `machine_index` is the machine that signed the statement.
    """

    machine_index: MachineIndex
    head: SignedHeader
    statement: SignedStatement


class TelemetryPage(Message):
    """One page of rows.

    `machines` are the (run, machine key) that the rows refer to by index. `position` is that of the
    page's last rows; `more`: there are rows after it.
    """

    machines: list[tuple[Id, PublicKey]] = Field(max_length=MACHINES)
    memberships: list[MachineRow] = Field(max_length=MAX_MACHINE_ROWS)
    rollups: list[RollupRow] = Field(max_length=MAX_ROLLUPS)
    points: list[LossRow] = Field(max_length=MAX_LOSSES)
    events: list[EventRow] = Field(max_length=MAX_EVENTS)
    witnesses: list[WitnessRow] = Field(default=[], max_length=MAX_WITNESS_ROWS)
    position: TelemetryPosition
    more: bool

    @model_validator(mode="after")
    def check_machine_indices(self) -> "TelemetryPage":
        """Check that every row refers to a machine of the page."""
        rows = (*self.memberships, *self.rollups, *self.points, *self.events, *self.witnesses)
        if max((row.machine_index for row in rows), default=-1) >= len(self.machines):
            raise ValueError("a row is of a machine that the page does not name")
        return self


class PageSignature(Message):
    """What a mirror signs of a page (kind "telemetry"): receiver, nonce and the page's BLAKE3."""

    mirror: PublicKey
    to: PublicKey
    nonce: Nonce
    digest: Digest


def _example_page() -> dict[str, Any]:
    """Build the documentation's example: a signed page without rows."""
    page = TelemetryPage(
        machines=[],
        memberships=[],
        rollups=[],
        points=[],
        events=[],
        position=TelemetryPosition(),
        more=False,
    )
    signature = PageSignature(mirror="a1" * 32, to="b2" * 32, nonce="c3" * 16, digest="d4" * 32)
    signed = Signed(key="a1" * 32, body=signature.model_dump_json(), signature="e5" * 64)
    return {"signature": signed.model_dump(), "text": page.model_dump_json()}


class SignedTelemetryPage(Message):
    """A signed `PageSignature`, and the `TelemetryPage` it signs: JSON, exactly as signed."""

    signature: Signed
    text: DocumentText = Field(max_length=PAGE_BYTES)

    model_config = ConfigDict(json_schema_extra={"examples": [_example_page()]})
