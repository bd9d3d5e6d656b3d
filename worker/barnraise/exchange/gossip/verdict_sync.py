"""Compare verdict sets and log heads with linked peers, and send what differs (anti-entropy). Pure.

A peer whose verdict set has another digest is sent this machine's whole set, repeatedly, until it
reports the same digest. The peer does the same, so that both end with the union. If version vector
and verdicts are equal and the headers behind them are not, an author has forked: each peer sends
the other its authors' last headers, and a peer that receives two headers with one identity has the
proof.

Gossip (`gossip`) compares sequence numbers only; this module compares the contents behind them.
"""

import math
from dataclasses import dataclass

from barnraise.protocol.messages import PeerState

RESEND_INTERVAL = 10.0  # seconds before a peer that still reports other verdicts is sent ours again
HEADS_INTERVAL = 3.0  # seconds before headers are compared again
MIN_MISMATCHES = (
    2  # consecutive States: an update that is just being stored may be in one digest only
)


@dataclass(frozen=True)
class SendVerdicts:
    """Send all our verdicts to this peer."""

    to: str


@dataclass(frozen=True)
class SendHeads:
    """Send our authors' last headers to this peer."""

    to: str


@dataclass
class PeerVerdicts:
    """What a linked peer reported last.

    Attributes:
        verdicts: Digest of its verdict set; None for the empty set.
        next_verdicts_at: When it may be sent our verdicts (again), in seconds.
        mismatches: In how many consecutive States its headers differed from ours.
        next_heads_at: When it may be sent our headers (again), in seconds.
    """

    verdicts: str | None = None
    next_verdicts_at: float = -math.inf
    mismatches: int = 0
    next_heads_at: float = -math.inf


class VerdictSync:
    """The verdict sets of the linked peers, compared with ours.

    Args:
        verdicts: Digest of our verdict set; None for the empty set.
    """

    def __init__(self, verdicts: str | None) -> None:
        self._verdicts = verdicts
        self._peers: dict[str, PeerVerdicts] = {}

    def on_state(self, key: str, state: PeerState, same_vector: bool, heads: str) -> None:
        """Record a peer's State.

        Args:
            key: The peer's key.
            state: Its State.
            same_vector: Whether its version vector equals ours.
            heads: Digest of our authors' last headers.
        """
        peer = self._peers.setdefault(key, PeerVerdicts())
        peer.verdicts = state.verdicts_digest
        differs = (
            same_vector
            and state.verdicts_digest == self._verdicts
            and state.heads_digest not in (None, heads)
        )
        peer.mismatches = peer.mismatches + 1 if differs else 0

    def on_verdicts(self, verdicts: str | None) -> None:
        """Record that our verdict set changed; peers with another set are sent ours at once."""
        self._verdicts = verdicts
        for peer in self._peers.values():
            peer.next_verdicts_at = -math.inf

    def on_disconnected(self, key: str) -> None:
        """Forget a peer."""
        self._peers.pop(key, None)

    def has_same_verdicts(self, key: str) -> bool:
        """Return whether this peer retracts the same updates as this machine."""
        return key in self._peers and self._peers[key].verdicts == self._verdicts

    def next_actions(self, now: float) -> list[SendVerdicts | SendHeads]:
        """Return what to send now and schedule when it may be sent again.

        Args:
            now: The time in seconds.
        """
        actions: list[SendVerdicts | SendHeads] = []
        for key, peer in self._peers.items():
            has_other_verdicts = self._verdicts is not None and peer.verdicts != self._verdicts
            if has_other_verdicts and now >= peer.next_verdicts_at:
                peer.next_verdicts_at = now + RESEND_INTERVAL
                actions.append(SendVerdicts(key))
            if peer.mismatches >= MIN_MISMATCHES and now >= peer.next_heads_at:
                peer.next_heads_at = now + HEADS_INTERVAL
                actions.append(SendHeads(key))
        return actions
