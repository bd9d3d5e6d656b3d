"""The mirror list among peers: who has an older one is told what leads to ours, and we take what is newer and holds.

So a mirror that was admitted or expelled is known to machines that reach none. What a ticket or a verdict is worth
follows from it: the run's own mirrors count, and, where they are of the list, all that are or were in it; of those that
were expelled no ticket opens a door any more.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from barnraise.errors import ListError
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.network.connection import Connection
from barnraise.protocol.messages import PeerState
from barnraise.protocol.mirror_list import (
    MAX_LISTS_PER_MESSAGE,
    MirrorLists,
    SignedMirrorList,
    lists_after,
    merge_chain,
    parse_list,
)

log = logging.getLogger("barnraise.exchange")

AGAIN = 30.0  # seconds after which a peer that still has an older list is told once more


class Ruled(Protocol):
    rules: UpdateRules


class MirrorListSync:
    def __init__(
        self,
        rules: UpdateRules,
        links: Mapping[str, Connection],
        clock: Callable[[], float],
        ruled: Sequence[Ruled],
    ):
        """`clock`: seconds since 1970. `ruled`: whoever goes by the rules, which change with the list."""
        self._base, self._links, self._clock, self._ruled = rules, links, clock, ruled
        self.chain: list[SignedMirrorList] = []
        self.version = 0
        self._told: dict[
            str, tuple[int, float]
        ] = {}  # peer → our version when it was told, and when (loop time)

    def know(self, lists: Sequence[SignedMirrorList]) -> None:
        """What this machine itself holds."""
        if lists and parse_list(lists[-1]).version > self.version:
            self._hold(list(lists))

    def heard(self, lists: MirrorLists) -> None:
        """What a peer told. Raises ListError for what nobody should have passed on; what is old, has expired, or cannot
        be checked here is let go."""
        try:
            chain = merge_chain(self.chain, lists.lists, self._clock())[-MAX_LISTS_PER_MESSAGE:]
        except ListError as error:
            if error.forged and self.chain:
                raise
            log.debug("%s", error)
            return
        if chain != self.chain:
            self._hold(chain)

    def answer(self, peer: str, state: PeerState, now: float) -> None:
        """A peer said which list it has. One that says nothing is of an older version, and would not read it."""
        if (
            state.mirror_list_version is None
            or state.mirror_list_version >= self.version
            or peer not in self._links
        ):
            return
        told, at = self._told.get(peer, (0, -AGAIN))
        if (told < self.version or now - at >= AGAIN) and (
            lists := lists_after(self.chain, state.mirror_list_version)
        ):
            self._told = {key: told for key, told in self._told.items() if key in self._links}
            self._told[peer] = self.version, now
            self._links[peer].send_message(MirrorLists(lists=lists))

    def _hold(self, chain: list[SignedMirrorList]) -> None:
        newest = parse_list(chain[-1])
        self.chain, self.version = chain, newest.version
        rules = self._base
        if rules.mirrors & newest.keys:
            rules = replace(
                rules, mirrors=rules.mirrors | newest.keys, expelled_mirrors=newest.expelled
            )
        for each in self._ruled:
            each.rules = rules
        for link in self._links.values():
            link.schedule_state()
        log.info("mirror list %d: %d mirrors", newest.version, len(newest.active))
