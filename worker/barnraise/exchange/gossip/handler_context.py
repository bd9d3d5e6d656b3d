"""What the handlers of updates share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from barnraise.exchange.gossip.gossip import Gossip
from barnraise.ledger.ledger import Ledger
from barnraise.peering.links.link_context import LinkContext

RunInThread = Callable[..., Awaitable[Any]]  # runs a call with its arguments outside the event loop


@dataclass(frozen=True)
class HandlerContext(LinkContext):
    """Give handlers the ledger and the gossip state, too."""

    ledger: Ledger
    gossip: Gossip  # the gossip state machine; it belongs to the event loop
    run_on_disk: RunInThread  # runs a call in the disk thread; calls run one after the other
