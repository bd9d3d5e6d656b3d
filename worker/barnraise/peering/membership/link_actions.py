"""What gossip decides about links, for the peer server to perform. Pure."""

from dataclasses import dataclass

from barnraise.protocol.messages import Peer


@dataclass(frozen=True)
class Dial:
    """Connect to this peer."""

    peer: Peer


@dataclass(frozen=True)
class SendPeers:
    """Send this peer the addresses of others."""

    to: str
    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class SendGoodbye:
    """Ask this peer to leave: it has other links, and we have too many."""

    to: str


@dataclass(frozen=True)
class RequestDial:
    """Have this peer pass our "dial now" on to another peer, which we dial in vain."""

    to: str
    target: str


@dataclass(frozen=True)
class CloseLink:
    """Close the link to this peer."""

    peer: str
    reason: str


LinkAction = Dial | SendPeers | SendGoodbye | RequestDial | CloseLink
