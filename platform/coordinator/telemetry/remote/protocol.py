"""What mirrors tell each other of machines that report to them: no event of it, only numbers as they are.

A page is what changed since a place that the asker names. Rows are absolute: a page that comes twice changes nothing.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from barnraise.protocol.enums import Activity
from barnraise.protocol.messages import Signed
from barnraise.protocol.reports import ExchangeView, PlanView
from barnraise.protocol.types import (
    Count,
    Digest,
    Id,
    Incarnation,
    Loss,
    Message,
    PublicKey,
    Rate,
    Seconds,
    UnixTime,
    Version,
)

MAX_MACHINE_ROWS, MAX_ROLLUPS, MAX_LOSSES, MAX_EVENTS = 200, 2000, 2000, 200  # of one page
PAGE_BYTES = 4 << 20  # of its text; such pages have a quarter of that at most
MACHINES = MAX_MACHINE_ROWS + MAX_ROLLUPS + MAX_LOSSES + MAX_EVENTS

Seq = Annotated[int, Field(ge=0, lt=1 << 53)]
Which = Annotated[int, Field(ge=0, lt=MACHINES)]  # of the page's `machines`


class RowPosition(NamedTuple):
    """Up to which row somebody has come: in the order of (moment, id)."""

    moment: Seq = 0
    id: Annotated[str, Field(pattern=r"^([0-9]{1,19}|[0-9a-f-]{36})$")] | None = None


class TelemetryPosition(Message):
    frames: RowPosition = RowPosition()
    sums: RowPosition = RowPosition()
    points: RowPosition = RowPosition()
    comings: RowPosition = RowPosition()


Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class TelemetryRequest(Message):
    """`nonce`: drawn for this one request, so that no older answer passes for the one to it."""

    after: TelemetryPosition = TelemetryPosition()
    nonce: Nonce


class MachineRow(Message):
    """A machine's newest report in a run, heard so many seconds ago: mirrors' clocks differ. `mark`: all reports up to
    this one are stored there. `plan`: only where it is another than at the asker's place."""

    of: Which
    age: Seconds
    latest: Seq
    mark: Seq
    activity: Activity
    version: Version
    incarnation: Incarnation
    step: Count
    tokens: Count
    ledger_tokens: Count
    rate: Rate
    updates_sent: Count
    updates_received: Count
    peers: int = Field(ge=0, le=100_000)
    vector: Digest
    anchor: Digest | None
    safe: bool  # it said that it holds the final weights
    step_seconds: Seconds | None
    exchange: ExchangeView | None
    plan: PlanView | None = None


MEMBERSHIP_FIELDS = ("latest", "mark", "activity", "version", "incarnation", "step", "tokens", "ledger_tokens", "rate",
           "updates_sent", "updates_received", "peers", "vector", "step_seconds")  # fmt: skip
"""Of a frame, what is called and said alike in a membership."""


class RollupRow(NamedTuple):
    """A row of `telemetry.Rollup`."""

    of: Which
    width: Literal[10, 60, 3600]
    bucket: Annotated[int, Field(ge=0, lt=1 << 36)]
    reports: Annotated[int, Field(ge=1, lt=1 << 31)]
    rate_sum: Annotated[float, Field(ge=0, lt=1e24, allow_inf_nan=False)]
    tokens: Count
    updates_sent: Count
    updates_received: Count
    peer_bytes_sent: Count
    peer_bytes_received: Count


class LossRow(NamedTuple):
    """A measured loss: the `position`-th of report `seq`."""

    of: Which
    seq: Seq
    position: Annotated[int, Field(ge=0, lt=64)]
    kind: Literal["train", "validation"]
    tokens: Count
    loss: Loss
    at: UnixTime


class EventRow(NamedTuple):
    """A machine joined, paused, went on, finished or left."""

    of: Which
    id: Id
    kind: Literal["joined", "paused", "resumed", "finished", "left"]
    at: UnixTime


class TelemetryPage(Message):
    """`machines`: (run, key) by which the rows name theirs. `places`: up to where this page reaches; `more`: there is
    more beyond."""

    machines: list[tuple[Id, PublicKey]] = Field(max_length=MACHINES)
    frames: list[MachineRow] = Field(max_length=MAX_MACHINE_ROWS)
    sums: list[RollupRow] = Field(max_length=MAX_ROLLUPS)
    points: list[LossRow] = Field(max_length=MAX_LOSSES)
    comings: list[EventRow] = Field(max_length=MAX_EVENTS)
    places: TelemetryPosition
    more: bool

    @model_validator(mode="after")
    def names_its_own(self) -> "TelemetryPage":
        rows = (*self.frames, *self.sums, *self.points, *self.comings)
        if max((row.of for row in rows), default=-1) >= len(self.machines):
            raise ValueError("a row is of a machine that the page does not name")
        return self


class PageSignature(Message):
    """What a mirror signs of a page (kind "news"): for whom and for which request it is, and its BLAKE3."""

    mirror: PublicKey
    to: PublicKey
    nonce: Nonce
    digest: Digest


class SignedTelemetryPage(Message):
    """`text`: News, as JSON, exactly as it was signed."""

    word: Signed
    text: str = Field(max_length=PAGE_BYTES)
