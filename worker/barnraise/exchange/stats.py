"""What an exchange does, in figures."""

from dataclasses import dataclass

from barnraise.exchange.compression.scheme import CHUNK
from barnraise.exchange.ledger.anchor_scrub import ScrubFindings
from barnraise.exchange.pacing.round_schedule import RoundSchedule
from barnraise.exchange.server import PeerServer
from barnraise.protocol.reports import ExchangeView


@dataclass(frozen=True)
class ExchangeStats:
    """Updates count from the ledger's birth, bytes (frames with their headers) from this node's start."""

    updates_sent: int  # published by this machine, in all its incarnations
    updates_received: int  # of others, in the ledger
    bytes_sent: int
    bytes_received: int
    peers: int  # connected now
    updates_behind: int  # updates that connected peers have and we lack
    sent_rate: float  # bytes/s just now
    received_rate: float
    uplink_rate: (
        float  # bytes/s that the line carries when there is something to carry; 0 while unknown
    )
    round_schedule: RoundSchedule | None  # of this machine's rounds; None before its first
    neighbours: tuple["NeighbourStats", ...]
    fragments_checked: int = 0  # fragments of the anchor held against the ledger
    corruptions: int = 0  # fragments and payload files that were found damaged…
    repaired: int = 0  # …and are whole again
    damaged_fragment: str | None = None  # the fragment that is not

    @property
    def summary(self) -> ExchangeView | None:
        if self.round_schedule is None:
            return None
        scheme = self.round_schedule.scheme
        return ExchangeView(
            round_steps=self.round_schedule.steps, scheme=str(scheme), density=scheme.kept / CHUNK, bits_per_parameter=scheme.bits_per_parameter,
            sent_rate=self.sent_rate, received_rate=self.received_rate, uplink_rate=self.uplink_rate, lag=self.updates_behind,
        )  # fmt: skip


@dataclass(frozen=True)
class NeighbourStats:
    """A connected peer. `lag`: updates that we have and it lacks; bytes/s just now; `agrees`: whether its anchor is
    ours, None before both were at one version vector."""

    key: str
    lag: int
    sent_rate: float
    received_rate: float
    agrees: bool | None


def collect_stats(
    hub: PeerServer, findings: ScrubFindings, rhythm: RoundSchedule | None
) -> ExchangeStats:
    """As things stand. `findings`: of the anchor's audit."""
    links, known = list(hub.links.values()), dict(hub.gossip.links)
    sent, received = hub.past_bytes
    vector = hub.ledger.vector()
    own = sum(seq for author, seq in vector.items() if author.startswith(hub.transport.key))
    return ExchangeStats(
        updates_sent=own,
        updates_received=sum(vector.values()) - own,
        bytes_sent=sent + sum(link.channel.bytes_sent for link in links),
        bytes_received=received + sum(link.channel.bytes_received for link in links),
        peers=len(links),
        updates_behind=hub.gossip.updates_behind,
        sent_rate=sum(link.sent_meter.rate for link in links),
        received_rate=sum(link.received_meter.rate for link in links),
        uplink_rate=hub.turns.measured_rate,
        round_schedule=rhythm,
        neighbours=tuple(
            NeighbourStats(
                link.key,
                _lag(vector, tie.vector),
                link.sent_meter.rate,
                link.received_meter.rate,
                tie.anchor_agrees,
            )
            for link in links
            if (tie := known.get(link.key))
        ),
        fragments_checked=findings.checked,
        corruptions=findings.corrupted + hub.scrub.found,
        repaired=findings.repaired + hub.scrub.repaired,
        damaged_fragment=findings.damaged,
    )


def _lag(ours: dict[str, int], theirs: dict[str, int]) -> int:
    return sum(max(0, seq - theirs.get(author, 0)) for author, seq in ours.items())
