"""How often a peer is sent what it needs to know of this machine's ledger."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateIntervals:
    """Seconds between two messages to one peer, ± a quarter.

    Attributes:
        usual_seconds: Between two States when nothing changes.
        longest_seconds: The same where the uplink is limited to little; with a quarter more, a peer
            does not take the link for dead.
        shortest_seconds: Between two States when something changes for the peer.
        full_seconds: Between two States with everything.
        slack_seconds: By which a State is early, to be sent together with another one.
        peers_seconds: Between two messages about other peers.
    """

    usual_seconds: float = 5.0
    longest_seconds: float = 12.0
    shortest_seconds: float = 2.0
    full_seconds: float = 30.0
    slack_seconds: float = 1.5
    peers_seconds: float = 30.0


STATE_INTERVALS = StateIntervals()
