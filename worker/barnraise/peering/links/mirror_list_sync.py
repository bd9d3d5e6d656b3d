"""Spread the mirror list among peers, so that machines that reach no mirror learn of changes.

A peer with an older list is sent the lists that lead to ours, and we accept a newer one that is
valid. The list decides what a ticket or a verdict is worth: the run's own mirrors count and, if
they are in the list, all mirrors that are or were in it. Tickets of expelled mirrors admit nobody.
"""

import logging
from collections.abc import Callable, Sequence

from barnraise.errors import MirrorListError
from barnraise.peering.links.link_context import LinkContext
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.protocol.messages import PeerState
from barnraise.protocol.mirror_list import (
    MAX_LISTS_PER_MESSAGE,
    MirrorLists,
    SignedMirrorList,
    lists_after,
    merge_chain,
    parse_list,
)
from barnraise.protocol.run_mirrors import RunMirrors

log = logging.getLogger("barnraise.exchange")

LIST_RESEND_SECONDS = 30.0  # until a peer that still has an older list is sent ours again


class MirrorListSync:
    """Store the newest mirror list and send it to peers that have an older one.

    Attributes:
        chain: The lists that lead to the newest one, which is the last.
        version: The newest list's version; 0 without one.
    """

    def __init__(
        self,
        run_mirrors: RunMirrors,
        context: LinkContext,
        clock: Callable[[], float],
        on_mirrors_changed: Callable[[RunMirrors], None],
        on_relays_changed: Callable[[list[str]], None],
    ) -> None:
        """Start without a list, with the mirrors that count then.

        `clock` returns seconds since 1970. `on_mirrors_changed` receives the mirrors that count by
        a new list, and `on_relays_changed` the relays that it names.
        """
        self._run_mirrors = run_mirrors
        self._connections = context.connections
        self._wake = context.wake
        self._clock = clock
        self._on_mirrors_changed = on_mirrors_changed
        self._on_relays_changed = on_relays_changed
        self.chain: list[SignedMirrorList] = []
        self.version = 0
        self._sent: dict[str, tuple[int, float]] = {}  # peer → version sent to it, and loop time

    def set_lists(self, lists: Sequence[SignedMirrorList]) -> None:
        """Use the lists that this machine itself has, if they are newer."""
        if lists and parse_list(lists[-1]).version > self.version:
            self._replace_chain(list(lists))

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {MirrorLists: self.on_lists}

    def on_lists(self, received: Received[MirrorLists]) -> None:
        """Receive a peer's lists; ignore old, expired and unverifiable ones.

        Raises:
            MirrorListError: When they are forged.
        """
        try:
            chain = merge_chain(self.chain, received.message.lists, self._clock())
        except MirrorListError as error:
            if error.forged and self.chain:
                raise
            log.debug("%s", error)
            return
        chain = chain[-MAX_LISTS_PER_MESSAGE:]
        if chain != self.chain:
            self._replace_chain(chain)
        self._wake()

    def on_state(self, peer: str, state: PeerState, now: float) -> None:
        """Send a peer our lists if its State names an older one.

        A peer that names no version runs an older program, which could not read a list.
        """
        theirs = state.mirror_list_version
        if theirs is None or theirs >= self.version or peer not in self._connections:
            return
        sent_version, sent_at = self._sent.get(peer, (0, -LIST_RESEND_SECONDS))
        if sent_version >= self.version and now - sent_at < LIST_RESEND_SECONDS:
            return
        if lists := lists_after(self.chain, theirs):
            self._sent = {key: sent for key, sent in self._sent.items() if key in self._connections}
            self._sent[peer] = self.version, now
            self._connections[peer].send_message(MirrorLists(lists=lists))

    def _replace_chain(self, chain: list[SignedMirrorList]) -> None:
        newest = parse_list(chain[-1])
        self.chain = chain
        self.version = newest.version
        self._on_mirrors_changed(self._run_mirrors.with_list(newest))
        self._on_relays_changed(newest.relays)
        for connection in self._connections.values():
            connection.schedule_state()
        log.info("mirror list %d: %d mirrors", newest.version, len(newest.active))
