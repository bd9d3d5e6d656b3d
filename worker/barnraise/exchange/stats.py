"""Figures of the exchange, for status and reports."""

from dataclasses import dataclass

from barnraise.planning.quantization_scheme import CHUNK
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.protocol.reports import MAX_SUSPENDED, ExchangeView
from barnraise.protocol.types import Message


class NeighbourView(Message):
    """A connected peer. `up` and `down` are bytes per second now, `lag` updates that it lacks."""

    key: str
    lag: int
    up: float
    down: float
    # Whether its anchor equals ours; None before both were at one version vector.
    agrees: bool | None
    relayed: bool = False  # whether it is reached through a relay


class ChecksumView(Message):
    """What the scrub of the anchor and the payload files has found."""

    checked: int = 0  # fragments of the anchor that were checked against the ledger
    corruptions: int = 0  # fragments and payload files that were found damaged
    repaired: int = 0  # how many of those have been repaired
    damaged: str | None = None  # the name of a fragment that is not repaired yet


@dataclass(frozen=True)
class ExchangeStats:
    """What the exchange has done: updates since the ledger's beginning, bytes since the start."""

    updates_sent: int  # published by this machine, in all its incarnations
    updates_received: int  # of other authors, in the ledger
    bytes_sent: int  # of all connections; see `Channel`
    bytes_received: int
    peers: int  # connected now
    updates_behind: int  # updates that connected peers have and we lack
    sent_rate: float  # bytes per second now
    received_rate: float  # bytes per second now
    # Bytes per second that the uplink carries while something is sent; 0 while unknown.
    uplink_rate: float
    # Of this machine's rounds; None before its first.
    round_schedule: RoundSchedule | None
    neighbours: tuple[NeighbourView, ...]
    checksum: ChecksumView
    # Why no snapshot is taken although one is needed; None if none is.
    waiting_reason: str | None = None
    # Whether machines on the internet that this one had not dialled have reached it.
    is_reached: bool = False
    suspended: tuple[str, ...] = ()  # digests of the volunteers whose updates are withheld

    @property
    def summary(self) -> ExchangeView | None:
        """The part that is reported to the coordinator; None before the first round."""
        schedule = self.round_schedule
        if schedule is None:
            return None
        scheme = schedule.scheme
        return ExchangeView(
            round_steps=schedule.steps,
            scheme=str(scheme),
            density=scheme.kept / CHUNK,
            bits_per_parameter=scheme.bits_per_parameter,
            sent_rate=self.sent_rate,
            received_rate=self.received_rate,
            uplink_rate=self.uplink_rate,
            lag=self.updates_behind,
            relayed=sum(neighbour.relayed for neighbour in self.neighbours),
            reached=self.is_reached,
            suspended=[volunteer[:16] for volunteer in self.suspended[:MAX_SUSPENDED]],
        )
