"""How often a peer is sent what it needs to know of this machine's ledger."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateIntervals:
    """Seconds between two messages to one peer, ± a quarter."""

    usual_seconds: float = 5.0  # between two States when nothing changes
    # The same where the uplink is limited to little; with a quarter more, a peer does not take the
    # link for dead.
    longest_seconds: float = 12.0
    shortest_seconds: float = 2.0  # between two States when something changes for the peer
    full_seconds: float = 30.0  # between two States with everything
    slack_seconds: float = 1.5  # by which a State is early, to be sent together with another one
    peers_seconds: float = 30.0  # between two messages about other peers


STATE_INTERVALS = StateIntervals()
