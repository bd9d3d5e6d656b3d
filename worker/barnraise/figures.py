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
    peer_rate_sent: Rate = 0.0  # bytes/s just now…
    peer_rate_received: Rate = 0.0
    uplink_rate: Rate = 0.0  # …and what this machine's line carries when it has something to carry, as measured
    lag: Count = 0  # updates that peers have and this machine lacks
    vector: Digest  # of the version vector's canonical JSON: peers are compared at equal ones
    anchor: Digest | None = None  # BLAKE3 of the anchor at that vector, where it was computed
    plan: PlanView | None = None  # in every report: a lost one, or a site that forgot, costs nothing
    step_seconds: Seconds | None = None  # of one step as measured, trading apart; a mean over some twenty
