"""What we lack, who has it, what is under way, and whom to ask for the rest: the asking half of `gossip`. Pure.

Nobody is asked for what is coming: an update that was announced has a while to come along the tree, and one that is
under way is waited for until its source stalls. Then somebody else is asked, for what is still missing of it.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

GRACE, GRACE_MOST = (
    1.0,
    15.0,
)  # seconds what was announced has to come along the tree; more where that has been slow
ASKED = 5.0  # seconds for an answer to begin
STALLED = 10.0  # seconds without a byte of an update that is under way
SHUNNED = 20.0  # who did not deliver something is not asked for it again this long
OVERTAKEN = (
    10.0  # seconds for which nobody must have what we lack next, to believe that nobody will
)
WINDOW = 64  # updates of one author under way at once
PER_LINK = 64  # updates asked of one peer at once


@dataclass
class Flight:
    """An update on its way to us; nobody else is asked for it until `deadline`. `begun`: its header is here."""

    source: str
    deadline: float
    begun: bool = False


class Holder(Protocol):
    """A linked peer, as far as it matters who has what. `gone`: up to where it has the payloads no more."""

    key: str
    eager: bool
    vector: dict[str, int]
    gone: dict[str, int]


class Asking:
    def __init__(self, seed: int):
        self.flights: dict[tuple[str, int], Flight] = {}
        self.banned: set[str] = set()  # authors nothing more is taken of
        self.wake = math.inf  # when an ask that waits for its grace is due
        self._ahead: dict[
            str, dict[str, None]
        ] = {}  # author → links that may have more of it than we (ordered)
        self._noticed: dict[str, dict[int, float]] = {}  # author → seq → when we first heard of it
        self._nobody: dict[str, float] = {}  # author → since when nobody has what we lack next
        self._shunned: dict[
            tuple[str, str, int], float
        ] = {}  # (peer, author, seq) asked in vain, until
        self._lag = 0.0  # seconds between an update's announcement and its push, a running mean
        self._random = random.Random(seed)

    # ---- facts

    def begin(self) -> None:
        self._ahead, self._nobody = {}, {}

    def notice(self, key: str, theirs: Mapping[str, int], mine: Mapping[str, int]) -> None:
        """What this link says it has, against what we have."""
        for author, seq in theirs.items():
            if seq > mine.get(author, 0):
                self._ahead.setdefault(author, {})[key] = None

    def held(self, author: str, seq: int) -> None:
        self.flights.pop((author, seq), None)
        self._noticed.get(author, {}).pop(seq, None)

    def pushed(self, key: str, author: str, seq: int, now: float) -> bool:
        """The header of an update we lack comes from this peer: whether its payloads should, too. Not while another
        is in the middle of sending them."""
        flight = self.flights.get((author, seq))
        elsewhere = flight is not None and flight.source != key
        if (noticed := self._noticed.get(author, {}).get(seq)) and (elsewhere or flight is None):
            self._lag += 0.2 * (now - noticed - self._lag)
        if elsewhere and flight.begun:
            return False
        self.arriving(key, author, seq, now)
        return True

    def arriving(self, key: str, author: str, seq: int, now: float) -> None:
        """Bytes of it have come from this peer."""
        self.flights[author, seq] = Flight(key, now + STALLED, begun=True)

    def waiting(self, author: str, seq: int) -> None:
        """It is whole here and waits for its author's earlier ones."""
        self.flights[author, seq] = Flight("", math.inf, begun=True)

    def failed(self, key: str, author: str, seq: int, now: float) -> None:
        """This peer cannot give us that update after all."""
        self.flights.pop((author, seq), None)
        self._shunned[key, author, seq] = now + SHUNNED

    def void(self, key: str) -> None:
        """What this peer had promised will not come."""
        self.flights = {
            what: flight for what, flight in self.flights.items() if flight.source != key
        }

    def ruled(self, out: Callable[[str, int], bool]) -> None:
        """Of what a verdict took out nothing is waited for."""
        self.flights = {what: flight for what, flight in self.flights.items() if not out(*what)}

    # ---- what follows

    def overtaken(self, now: float) -> bool:
        return any(now >= since + OVERTAKEN for since in list(self._nobody.values()))

    def lost(self, mine: Mapping[str, int], now: float) -> None:
        """Who has begun an update and not gone on is not waited for any longer."""
        for (author, seq), flight in list(self.flights.items()):
            if now >= flight.deadline:
                self.failed(flight.source, author, seq, now)
            elif seq <= mine.get(author, 0):
                del self.flights[author, seq]
        self._shunned = {what: until for what, until in self._shunned.items() if until > now}

    def asks(
        self, links: Mapping[str, Holder], mine: Mapping[str, int], now: float
    ) -> list[tuple[str, str, int]]:
        """(peer, author, seq) to ask for now, each author's in order."""
        self.wake = math.inf
        if not self._ahead:
            return []
        load = dict.fromkeys(links, 0)
        for flight in self.flights.values():
            if flight.source in load:
                load[flight.source] += 1
        pushing = any(link.eager for link in links.values())
        grace = min(GRACE_MOST, max(GRACE, 4 * self._lag)) if pushing else 0.0
        wanted: list[tuple[str, str, int]] = []
        for author, keys in list(self._ahead.items()):
            have = mine.get(author, 0)
            able = [
                link
                for key in keys
                if (link := links.get(key)) and link.vector.get(author, 0) > have
            ]
            if not able or author in self.banned:
                for table in (self._ahead, self._noticed, self._nobody):
                    table.pop(author, None)
            elif all(link.gone.get(author, 0) > have for link in able):
                self._nobody.setdefault(author, now)
            else:
                self._nobody.pop(author, None)
                last = min(have + WINDOW, max(link.vector[author] for link in able))
                wanted += self._of(author, range(have + 1, last + 1), able, load, grace, now)
        return wanted

    def _of(
        self,
        author: str,
        seqs: range,
        links: list[Holder],
        load: dict[str, int],
        grace: float,
        now: float,
    ) -> list[tuple[str, str, int]]:
        """What is missing of one author, not under way, and past its grace; of as few peers as can be."""
        wanted = []
        noticed = self._noticed.setdefault(author, {})
        favourite = None
        for seq in seqs:
            if (author, seq) in self.flights:
                continue
            if (ripe := noticed.setdefault(seq, now) + grace) > now:
                self.wake = min(self.wake, ripe)
                continue
            holders = [
                link for link in links if link.gone.get(author, 0) < seq <= link.vector[author]
            ]
            holders = [link for link in holders if load[link.key] < PER_LINK]
            able = [link for link in holders if (link.key, author, seq) not in self._shunned]
            if not able:
                self.wake = min(
                    [self.wake] + [self._shunned[link.key, author, seq] for link in holders]
                )
                continue
            if favourite not in able:
                favourite = min(able, key=lambda link: (load[link.key], self._random.random()))
            load[favourite.key] += 1
            self.flights[author, seq] = Flight(favourite.key, now + ASKED)
            wanted.append((favourite.key, author, seq))
        return wanted
