"""What a machine says of itself in a run: its losses, its plan, its figures. Everybody finds it in `wire`."""

from typing import Literal

from pydantic import Field

from barnraise.states import Activity
from barnraise.terms import Address, Count, Digest, Incarnation, Loss, Message, Rate, Seconds, Time, Version, Words


class Point(Message):
    """One measured loss, in nats a token, when the ledger held so many tokens."""

    kind: Literal["train", "validation"]
    tokens: Count
    loss: Loss


class PlanView(Message):
    """How a machine has decided to train, for people to read."""

    device: Words = Field(max_length=80)
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
    binding: Words = Field(max_length=40)  # the resource that limits: "compute", "disk", "link", "optimizer"
    predicted_seconds: Seconds  # of one step
    disk_written_per_day: Count  # bytes
    sentence: Words = Field(max_length=300)


class TradeView(Message):
    """How a machine trades its updates, for people to read."""

    round_steps: int = Field(ge=1, le=1_000_000)  # of its rounds as they are now
    form: Words = Field(max_length=20)  # of its updates: "dense4", "top64x2"
    density: float = Field(gt=0, le=1)  # the part of all values that they say
    bits: float = Field(gt=0, le=64)  # a parameter, all told
    sent_rate: Rate  # bytes/s just now…
    received_rate: Rate
    uplink_rate: Rate  # …and what its line carries when there is something to carry, as measured; 0: not known yet
    lag: Count  # updates that peers have and it lacks


class Report(Message):
    """One machine's numbers over the seconds since its report before. Totals count from the state folder's birth."""

    seq: int = Field(ge=1, lt=1 << 53)
    at: Time
    version: Version
    activity: Activity
    incarnation: Incarnation
    addresses: list[Address] = Field(max_length=8)
    step: Count
    tokens: Count  # published by this machine, total
    ledger_tokens: Count  # by everybody, as far as this machine knows
    rate: Rate  # tokens/s
    points: list[Point] = Field(default=[], max_length=64)
    updates_sent: Count
    updates_received: Count
    peers: int = Field(ge=0, le=100_000)  # connected now
    peer_bytes_sent: Count
    peer_bytes_received: Count
    vector: Digest  # of the version vector's canonical JSON: peers are compared at equal ones
    anchor: Digest | None = None  # BLAKE3 of the anchor at that vector, where it was computed
    plan: PlanView | None = None  # in every report: a lost one, or a site that forgot, costs nothing
    step_seconds: Seconds | None = None  # of one step as measured, trading apart; a mean over some twenty
    trade: TradeView | None = None
