"""Figures of the exchange, for status and reports."""

from dataclasses import dataclass

from barnraise.planning.quantization_scheme import CHUNK
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.protocol.reports import ExchangeView


@dataclass(frozen=True)
class NeighbourStats:
    """A connected peer.

    Attributes:
        key: Its key.
        lag: Updates that we have and it lacks.
        sent_rate: Bytes per second sent to it now.
        received_rate: Bytes per second received from it now.
        agrees: Whether its anchor equals ours; None before both were at one version vector.
        is_relayed: Whether it is reached through a relay.
    """

    key: str
    lag: int
    sent_rate: float
    received_rate: float
    agrees: bool | None
    is_relayed: bool = False


@dataclass(frozen=True)
class ExchangeStats:
    """What the exchange has done: updates since the ledger's beginning, bytes since the start.

    Attributes:
        updates_sent: Published by this machine, in all its incarnations.
        updates_received: Of other authors, in the ledger.
        bytes_sent: Frames and their headers.
        bytes_received: Frames and their headers.
        peers: Connected now.
        updates_behind: Updates that connected peers have and we lack.
        sent_rate: Bytes per second now.
        received_rate: Bytes per second now.
        uplink_rate: Bytes per second that the uplink carries while something is sent; 0 while
            unknown.
        round_schedule: Of this machine's rounds; None before its first.
        neighbours: The connected peers.
        fragments_checked: Fragments of the anchor that were checked against the ledger.
        corruptions: Fragments and payload files that were found damaged.
        repaired: How many of those have been repaired.
        damaged_fragment: The name of a fragment that is not repaired yet.
        waiting_reason: Why no snapshot is taken although one is needed; None if none is.
        is_reached: Whether machines on the internet that this one had not dialled have reached it.
        doubted: Digests of the volunteers that count for nothing.
    """

    updates_sent: int
    updates_received: int
    bytes_sent: int
    bytes_received: int
    peers: int
    updates_behind: int
    sent_rate: float
    received_rate: float
    uplink_rate: float
    round_schedule: RoundSchedule | None
    neighbours: tuple[NeighbourStats, ...]
    fragments_checked: int = 0
    corruptions: int = 0
    repaired: int = 0
    damaged_fragment: str | None = None
    waiting_reason: str | None = None
    is_reached: bool = False
    doubted: tuple[str, ...] = ()

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
            relayed=sum(neighbour.is_relayed for neighbour in self.neighbours),
            reached=self.is_reached,
            doubted=self.doubted[0][:16] if self.doubted else None,
        )
