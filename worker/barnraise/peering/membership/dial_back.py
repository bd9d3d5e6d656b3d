"""Decide who dials a machine that wants to learn whether strangers reach it, and how often. Pure.

A router lets in whom its own machine has dialled, so a peer that is linked to a machine cannot tell
whether others reach it. It passes the request on to a peer that the machine has not dialled. Where
there is none, it dials itself from another port: most routers let in one port alone.

A machine is dialled only at the address from which the peer that it asked sees it: nobody can have
a third party dialled by asking. Who passes a request on could name a victim's address, as in any
report of addresses. So the budgets of unproven addresses hold (`dial_limits`), and requests are
bounded: of each key, of each network and in all. Times are in seconds.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from barnraise.peering.addresses.addresses import host_of, network_of, version_of
from barnraise.peering.limits.service_budget import ServiceBudget
from barnraise.peering.limits.service_limits import Service


@dataclass(frozen=True)
class Helper:
    """A linked peer that may dial a machine.

    Attributes:
        key: The peer's key.
        volunteer: Digest of its volunteer.
        address: host:port at which this machine sees it; empty if it is relayed.
    """

    key: str
    volunteer: str
    address: str


class DialBackLimits:
    """Bound the requests that are served and the errands that are done."""

    def __init__(self) -> None:
        self._served = ServiceBudget(Service.DIAL_BACKS)
        self._done = ServiceBudget(Service.ERRANDS)

    def may_serve(self, key: str, address: str, now: float) -> bool:
        """Return whether to serve one more request of a machine, by its key and host:port."""
        return self._served.try_consume({"key": key, "network": network_of(address)}, now)

    def may_do_errand(self, volunteer: str, address: str, now: float) -> bool:
        """Return whether to dial one more host:port for a peer of a volunteer."""
        names = {"volunteer": volunteer, "network": network_of(address)}
        return self._done.try_consume(names, now)


def choose_helper(
    helpers: Sequence[Helper], machine: Helper, met: Collection[str], own_hosts: Collection[str]
) -> str | None:
    """Return the key of the peer that is to dial a machine; None if none is a stranger to it.

    The machine has met some peers, and dialled the asked one's own hosts: its router may let in who
    shares these.
    """
    excluded_hosts = {host_of(machine.address), *own_hosts}
    suitable = [
        helper.key
        for helper in helpers
        if helper.key not in {machine.key, *met}
        and helper.volunteer != machine.volunteer
        and helper.address
        and version_of(helper.address) == version_of(machine.address)
        and host_of(helper.address) not in excluded_hosts
    ]
    return random.choice(suitable) if suitable else None


def choose_asked(helpers: Sequence[Helper], volunteer: str, count: int) -> list[str]:
    """Return the keys of the linked peers to ask: those of other people first, one of each."""
    reachable = [helper for helper in helpers if helper.address]
    firsts = {helper.volunteer: helper.key for helper in reversed(reachable)}
    own = firsts.pop(volunteer, None)
    return [*firsts.values(), *([own] if own else [])][:count]
