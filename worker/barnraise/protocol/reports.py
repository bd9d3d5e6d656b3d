"""What a machine says of itself in a run: its losses, its plan, its figures. Everybody finds it in `wire`."""

from typing import Annotated, Literal

from pydantic import Field

from barnraise.protocol.enums import Activity
from barnraise.protocol.types import (
    Address,
    Count,
    Digest,
    Incarnation,
    Loss,
    Message,
    PlainText,
    Rate,
    Seconds,
    Sketch,
    UnixTime,
    Version,
)


class LossPoint(Message):
    """One measured loss, in nats a token, when the ledger held so many tokens."""

    kind: Literal["train", "validation"]
    tokens: Count
    loss: Loss


class PlanView(Message):
    """How a machine has decided to train, for people to read."""

    device: PlainText = Field(max_length=80)
    device_bytes: Count  # the plan's need of each tier
    host_bytes: Count
    disk_bytes: Count
    groups: int = Field(ge=1, le=100_000)  # of a step's forward pass
    micro_batches: int = Field(ge=1, le=1_000_000)
    micro_tokens: int = Field(ge=1, lt=1 << 53)
    layers: int = Field(ge=1, le=100_000)
    resident: int = Field(ge=0, le=100_000)  # layers whose training state stays in memory
    clipping: Literal["none", "exact", "layer"]
    crash_safety: Literal["exact", "restart", "round"]
    binding: PlainText = Field(
        max_length=40
    )  # the resource that limits: "compute", "disk", "link", "optimizer"
    predicted_seconds: Seconds  # of one step
    disk_written_per_day: Count  # bytes
    sentence: PlainText = Field(max_length=300)


class ExchangeView(Message):
    """How a machine trades its updates, for people to read."""

    round_steps: int = Field(ge=1, le=1_000_000)  # of its rounds as they are now
    scheme: PlainText = Field(max_length=20)  # of its updates: "dense4", "top64x2"
    density: float = Field(gt=0, le=1)  # the part of all values that they say
    bits_per_parameter: float = Field(gt=0, le=64)  # a parameter, all told
    sent_rate: Rate  # bytes/s just now…
    received_rate: Rate
    uplink_rate: Rate  # …and what its line carries when there is something to carry, as measured; 0: not known yet
    lag: Count  # updates that peers have and it lacks


class CheckpointView(Message):
    """Shared weights that a machine holds whole on its disk: at which version vector (its digest), what BLAKE3 and what
    sketch they have, and how long they are, as int32. Other machines at that vector hold the same, or something is
    wrong."""

    tokens: Count  # in the ledger behind them
    vector: Digest
    digest: Digest
    checksum: Sketch
    size: Count  # bytes


class Report(Message):
    """One machine's numbers over the seconds since its report before. Totals count from the state folder's birth."""

    seq: int = Field(ge=1, lt=1 << 53)
    at: UnixTime
    version: Version
    activity: Activity
    incarnation: Incarnation
    addresses: list[Address] = Field(max_length=8)
    step: Count
    tokens: Count  # published by this machine, total
    ledger_tokens: Count  # by everybody, as far as this machine knows
    rate: Rate  # tokens/s
    points: list[LossPoint] = Field(default=[], max_length=64)
    updates_sent: Count
    updates_received: Count
    peers: int = Field(ge=0, le=100_000)  # connected now
    peer_bytes_sent: Count
    peer_bytes_received: Count
    vector: Digest  # of the version vector's canonical JSON: peers are compared at equal ones
    anchor: Digest | None = None  # BLAKE3 of the anchor at that vector, where it was computed
    plan: PlanView | None = (
        None  # in every report: a lost one, or a site that forgot, costs nothing
    )
    step_seconds: Seconds | None = (
        None  # of one step as measured, trading apart; a mean over some twenty
    )
    exchange: ExchangeView | None = None
    checkpoint: CheckpointView | None = (
        None  # the last it made: in every report, so that none is lost
    )


Speed = Annotated[
    float, Field(ge=1, lt=1e18, allow_inf_nan=False)
]  # FLOP, bytes or parameters a second
Speeds = Annotated[
    list[tuple[Count, Speed]], Field(max_length=32)
]  # (a size, the speed at it), ascending in size
Dtype = Literal["float32", "bfloat16"]


class ProductsView(Message):
    """Of matrix products in one dtype."""

    dtype: Dtype
    forward: Speeds
    backward: Speeds


class UpdatesView(Message):
    """Of AdamW in one form."""

    where: Literal["host", "device"]
    dtype: Dtype
    bits: Literal[8, 32]
    rate: Speed


class HardwareView(Message):
    """What a machine can do, as it measured itself: `hardware.Hardware`, bounded. A coordinator reckons with it what a
    run would take here."""

    device: Literal["cpu", "cuda"]
    name: PlainText = Field(max_length=80)
    cores: int = Field(ge=1, le=100_000)
    memory: Count
    device_memory: Count
    disk: Count
    dtype: Dtype
    matmul: Speeds = Field(min_length=1)
    attention: Speed
    elementwise: Speed
    to_device: Speed
    from_device: Speed
    stream: Speed
    adam: Speed
    disk_read: Speed
    disk_write: Speed
    products: list[ProductsView] = Field(default=[], max_length=4)
    attention_contexts: Speeds = []
    attention_heads: Speeds = []
    attention_backward: float = Field(default=0.0, ge=0, lt=1e18, allow_inf_nan=False)
    logits: Speeds = []
    updates: list[UpdatesView] = Field(default=[], max_length=16)
