"""Let two peers behind routers dial each other at one time, through a peer of both. Pure.

A router lets a packet in only from where its own machine has just sent one. So neither of two
machines behind routers can dial the other, but both can at one time (Ford, Srisuresh and Kegel,
"Peer-to-Peer Communication Across Network Address Translators", USENIX 2005, section 3). A machine
whose dial is not answered asks a peer that is linked to both to pass on a signed statement with its
addresses. The target answers in the same way and dials at once, and so does the first machine when
the answer arrives.

Statements cost their receivers packets to addresses that a stranger names. So everybody obeys and
passes on a bounded number: for each signer, for each volunteer that passes them on, and in all. The
addresses have the same budgets as in any other dial (`dial_limits`). Times are in seconds.
"""

import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from barnraise.peering.addresses.addresses import host_of
from barnraise.peering.limits.back_off import BackOff
from barnraise.peering.limits.service_budget import ServiceBudget
from barnraise.peering.limits.service_limits import Service
from barnraise.peering.membership.link_actions import RequestDial
from barnraise.protocol.ip_addresses import is_public_host
from barnraise.protocol.mirror_list import is_relay_url
from barnraise.protocol.table_sizes import SOME, store_newest

PATIENCE_SECONDS = 2.0  # that a dial is alone, before a common peer is asked
HELP_SECONDS = 5.0  # after a dial that was not answered, in which a common peer is still asked
HELP_REQUESTS = BackOff(15.0, 600.0)  # between two requests for one peer
MAX_VIA = 8  # linked peers that are remembered for each of them
STATEMENT_SECONDS = 30.0  # for which a statement is fresh, by the coordinators' clock
PUNCH_SECONDS = (2.5, 3.0, 4.0)  # that each of the three dials of one statement lasts


@dataclass
class _Attempt:
    """A dial that has not been answered yet, and when to ask for help with it.

    Attributes:
        next_request: When to ask, in seconds.
        requests: For this peer, so far.
        expires: Until when to ask; inf while the dial lasts.
    """

    next_request: float
    requests: int = 0
    expires: float = math.inf


class Rendezvous:
    """Decide whom to ask for help with a dial, and whose statements to obey and to pass on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._attempts: dict[str, _Attempt] = {}  # by the key that is dialled now
        self._requested: dict[str, tuple[int, float]] = {}  # key → requests so far, next one
        self._vias: dict[str, dict[str, None]] = {}  # key → peers that are linked to it
        self._obeyed = ServiceBudget(Service.OBEYED_STATEMENTS)
        self._passed = ServiceBudget(Service.PASSED_STATEMENTS)

    # ---- events

    def on_peers(self, via: str, keys: Iterable[str]) -> None:
        """Record that a linked peer says to which peers it is linked."""
        for key in keys:
            vias = self._vias.get(key, {})
            store_newest(vias, via, None, MAX_VIA)
            store_newest(self._vias, key, vias, SOME)

    def on_dial(self, key: str, now: float) -> None:
        """Record that a peer is being dialled."""
        requests, next_request = self._requested.get(key, (0, -math.inf))
        self._attempts[key] = _Attempt(max(now + PATIENCE_SECONDS, next_request), requests)

    def on_dial_failed(self, key: str, now: float) -> None:
        """Record that a dial was not answered: help is useful for a while longer.

        A dial can fail at once, where a router refuses it.
        """
        if key in self._attempts:
            self._attempts[key].expires = now + HELP_SECONDS

    def on_dial_ended(self, key: str) -> None:
        """Record that a dial was answered, or is needless."""
        self._attempts.pop(key, None)

    def on_connected(self, key: str) -> None:
        """Record that a peer is linked: the next request for it may be made soon."""
        self._attempts.pop(key, None)
        self._requested.pop(key, None)

    # ---- decisions

    def choose_requests(self, links: Collection[str], now: float) -> list[RequestDial]:
        """Return whom of the linked peers to ask now to pass on statements, and record that."""
        requests: list[RequestDial] = []
        expired = [key for key, attempt in self._attempts.items() if now >= attempt.expires]
        for key in expired:
            del self._attempts[key]
        for target, attempt in self._attempts.items():
            if now < attempt.next_request or target in links or not links:
                continue
            known = [via for via in self._vias.get(target, ()) if via in links]
            # A coordinator names peers without saying who is linked to them.
            via = self._random.choice(known or sorted(links))
            requests.append(RequestDial(via, target))
            wait = HELP_REQUESTS.pause_seconds(attempt.requests)
            attempt.requests += 1
            attempt.next_request = now + wait * (1 + self._random.random() / 2)
            request = (attempt.requests, attempt.next_request)
            store_newest(self._requested, target, request, SOME)
        return requests

    def next_wakeup(self, links: Collection[str]) -> float:
        """Return when `choose_requests` is worth calling again, in seconds; inf if no time is."""
        if not links:
            return math.inf
        times = [
            attempt.next_request
            for target, attempt in self._attempts.items()
            if target not in links and attempt.next_request < attempt.expires
        ]
        return min(times, default=math.inf)

    def may_pass(self, volunteer: str, target: str, now: float) -> bool:
        """Return whether to pass on one more statement of a volunteer to a target."""
        return self._passed.try_consume({"volunteer": volunteer, "target": target}, now)

    def may_obey(self, signer: str, volunteer: str, now: float) -> bool:
        """Return whether to obey one more statement of a key, passed on by a volunteer's peer."""
        return self._obeyed.try_consume({"signer": signer, "volunteer": volunteer}, now)


def order_candidates(addresses: Sequence[str], own_addresses: Sequence[str]) -> list[str]:
    """Return another machine's addresses, those first that this machine most probably reaches.

    Two machines behind one router have one public address. Most routers do not let them reach each
    other there; their private addresses do. Elsewhere a private address means another computer.
    """
    relays = [address for address in addresses if is_relay_url(address)]
    addresses = [address for address in addresses if not is_relay_url(address)]
    own_hosts = {host_of(address) for address in own_addresses}
    is_same_home = any(
        _is_public(address) and host_of(address) in own_hosts for address in addresses
    )
    has_public = any(_is_public(address) for address in addresses)
    if is_same_home:
        return [*sorted(addresses, key=_is_public), *relays]
    direct = [address for address in addresses if _is_public(address) or not has_public]
    return [*direct, *relays]


def _is_public(address: str) -> bool:
    return is_public_host(host_of(address))
