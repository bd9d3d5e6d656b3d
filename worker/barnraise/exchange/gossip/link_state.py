"""A connected peer, as gossip sees it. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from barnraise.peering.membership.membership import Meeting


@dataclass
class LinkState:
    """A connected peer: what it reported last, and what it is to be sent.

    All times are in seconds. A `vector` maps authors to the sequence number of their last update,
    and `pruned` to the one up to which their payloads have been removed.
    """

    key: str  # the peer's key
    connected_at: float
    last_received_at: float  # when its last message arrived
    next_full_state_at: float  # when it is sent our next full State
    volunteer: str = ""  # digest of its volunteer, from its ticket; its key if that is unknown
    next_state_at: float = 0.0  # when it is sent our next State at the latest
    last_state_at: float = -math.inf  # when it was sent our last State
    next_peers_at: float = 0.0  # when it is sent our next message about other peers
    has_news: bool = True  # whether something worth a State has changed since the last one
    # Authors whose changes it has not been sent (an ordered set).
    changed_authors: dict[str, None] = field(default_factory=dict[str, None])
    # Author → sequence number up to which the next State declines pushes.
    to_decline: dict[str, int] = field(default_factory=dict[str, int])
    # How it came about: whose machine it is, who dialled and from where.
    meeting: Meeting = field(default_factory=Meeting)
    eager: bool = True  # whether new updates are pushed to it, not only announced
    # Machines whose updates are only announced to it, as they reach it over other links (an ordered
    # set).
    lazy_keys: dict[str, None] = field(default_factory=dict[str, None])
    # When one side said goodbye; None if neither did.
    leaving_since: float | None = None
    # What it has, of authors that are known here.
    vector: dict[str, int] = field(default_factory=dict[str, int])
    pruned: dict[str, int] = field(default_factory=dict[str, int])  # what it has no payloads of
    # Author → sequence number up to which it has declined pushes.
    declined: dict[str, int] = field(default_factory=dict[str, int])
    rate: float = 0.0  # tokens per second at which it trains
    anchor_vector: str | None = None  # digest of the vector of its anchor
    anchor_digest: str | None = None  # digest of its anchor at that vector
    # Whether its anchor equals ours, when both were last at one vector; None if they never were.
    anchor_agrees: bool | None = None
    complete: bool = False  # whether it will publish no further updates
    uplink: float | None = None  # bytes per second that it states; 0: it passes nothing on
    relayed: int = 0  # updates of others that came from it since it last failed to carry
    is_fast: bool = False  # whether it states an uplink far above this machine's
    carries: bool = False  # whether it passes on what it has, much faster than this machine can
    has_state: bool = False  # whether its first State has arrived

    def is_state_due(self, now: float, min_interval: float, slack: float = 0.0) -> bool:
        """Return whether this peer is to be sent a State, early by so many seconds at most."""
        has_news = self.has_news and now >= self.last_state_at + min_interval
        return has_news or now + slack >= self.next_state_at or bool(self.to_decline)

    def is_eager_for(self, author: str) -> bool:
        """Return whether new updates of an author are pushed to this peer."""
        return self.eager and author.partition(".")[0] not in self.lazy_keys

    def make_eager_for(self, author: str) -> None:
        """Push new updates of an author to this peer from now on."""
        self.eager = True
        self.lazy_keys.pop(author.partition(".")[0], None)

    def make_lazy_for(self, lazy: Iterable[str], authors: Iterable[str]) -> None:
        """Only announce new updates of some authors to this peer from now on.

        Args:
            lazy: These authors.
            authors: All authors; a link that is lazy for all of them is lazy for new ones too.
        """
        self.lazy_keys |= {author.partition(".")[0]: None for author in lazy}
        self.eager = any(other.partition(".")[0] not in self.lazy_keys for other in authors)
