"""Choose the peer with a fast uplink that passes this machine's updates on to all others. Pure.

On a home line an update takes many seconds for each copy. If a linked peer states an uplink of at
least four times this machine's, and was seen to pass on updates of others, this machine sends an
update to it alone: to the *carrier*. Once the carrier has it the other peers are told, and receive
it from there. A statement proves nothing. So a carrier counts only as far as the others report the
update in time: one that reaches half of them counts for half of what it states, and one that
reaches fewer, or leaves, is not chosen again for a while. What it did not reach is sent as without
a carrier.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from barnraise.exchange.gossip.link_state import LinkState
from barnraise.exchange.gossip.requests import UPDATE_WINDOW
from barnraise.peering.limits.back_off import BackOff
from barnraise.protocol.table_sizes import FEW, store_newest


@dataclass(frozen=True)
class CarrierRules:
    """When a peer carries, and how long it is waited for.

    Attributes:
        min_ratio: Of its uplink to this machine's.
        min_share: Of the others that an update must reach in time.
        min_credit: Below which what a carrier states is not reduced.
        recovery: By which a carrier counts for more after each update that reached all.
        patience: How many times the usual seconds an update may take.
        min_seconds: That it may take in any case: a processor may be busy for some of them.
        silent_seconds: Without a message from a carrier, after which it is taken for gone.
        repair_seconds: For which the next update waits at most until peers have what a carrier
            lost.
        first_seconds: Expected of an update before one was measured.
        pauses: Before a volunteer whose machine failed to carry is chosen again.
    """

    min_ratio: float = 4.0
    min_share: float = 0.5
    min_credit: float = 0.25
    recovery: float = 1.25
    patience: float = 2.0
    min_seconds: float = 20.0
    silent_seconds: float = 10.0
    repair_seconds: float = 120.0
    first_seconds: float = 30.0
    pauses: BackOff = field(default_factory=lambda: BackOff(60.0, 3600.0))


Links = Mapping[str, LinkState]


@dataclass
class _CarrierRecord:
    """How a volunteer's machines have carried."""

    credit: float = 1.0  # the share of their stated uplink that counts
    failures: int = 0  # in a row
    paused_until: float = -math.inf


@dataclass
class Spread:
    """How one update of this machine reaches the linked peers.

    Attributes:
        author: This machine's name as an author.
        seq: The update's sequence number.
        started_at: When this machine began to send it, in seconds.
        targets: How many peers lacked it, the carrier not counted.
        waiting: Keys of those that have not reported it.
        carrier: Key of the peer that carries it; empty if it spreads along the tree.
        volunteer: Digest of the carrier's volunteer.
        deadline: When the carrier has failed, or a failed one's update is given up, in seconds.
        is_sent: Whether all of it was sent to the carrier, maybe only to a buffer.
        has_carrier_it: Whether the carrier has it, so that the others are told.
        is_owed: Whether this machine may have to send it to everybody yet.
    """

    author: str
    seq: int
    started_at: float
    targets: int
    waiting: set[str]
    carrier: str = ""
    volunteer: str = ""
    deadline: float = math.inf
    is_sent: bool = False
    has_carrier_it: bool = False
    is_owed: bool = False

    @property
    def carried_share(self) -> float:
        """The part of the targets that the carrier has reached."""
        return 1.0 - len(self.waiting) / max(1, self.targets)

    @property
    def is_withheld(self) -> bool:
        """Whether peers other than the carrier are not told of it yet."""
        return bool(self.carrier) and not self.has_carrier_it


class Carriers:
    """The carriers of one machine, and its updates under way."""

    def __init__(self) -> None:
        self._rules = CarrierRules()
        self._records: dict[str, _CarrierRecord] = {}  # by volunteer
        self._spreads: dict[tuple[str, int], Spread] = {}  # by author and seq
        self._usual_seconds = self._rules.first_seconds  # until an update has reached all

    # ---- who can carry

    def is_far_above(self, uplink: float | None, other: float) -> bool:
        """Return whether an uplink is so much faster than another one that it can carry for it."""
        return bool(uplink) and uplink >= self._rules.min_ratio * max(other, 1.0)

    def rate(self, link: LinkState, now: float) -> float:
        """Return the bytes per second of a peer's uplink that count; 0 if it does not carry."""
        record = self._records.get(link.volunteer, _CarrierRecord())
        if not (link.uplink and link.relayed) or now < record.paused_until:
            return 0.0
        return record.credit * link.uplink

    def carries(self, link: LinkState, own_uplink: float, now: float) -> bool:
        """Return whether a linked peer can pass on updates for a machine with such an uplink."""
        is_here = link.has_state and not link.complete and link.leaving_since is None
        is_silent = link.last_received_at <= now - self._rules.silent_seconds
        return is_here and not is_silent and self.is_far_above(self.rate(link, now), own_uplink)

    def choose(self, links: Links, own_uplink: float, now: float) -> LinkState | None:
        """Return the linked peer that carries best; None if none does."""
        able = [link for link in links.values() if self.carries(link, own_uplink, now)]
        return max(able, key=lambda link: self.rate(link, now), default=None)

    # ---- updates under way

    def start(
        self,
        update: tuple[str, int],
        lacking: set[str],
        carrier: LinkState | None,
        now: float,
        is_repair: bool,
    ) -> bool:
        """Follow an update of this machine, which the linked peers `lacking` lack, from now on.

        Returns:
            Whether it is sent to the carrier alone.
        """
        others = lacking - {carrier.key} if carrier else lacking
        if len(self._spreads) >= UPDATE_WINDOW or not others:
            return False
        spread = self._spreads[update] = Spread(*update, now, len(others), others)
        if carrier:
            spread.carrier, spread.volunteer = carrier.key, carrier.volunteer
            seconds = max(self._rules.min_seconds, self._rules.patience * self._usual_seconds)
            spread.deadline = now + 2 * seconds  # this machine has to send it first
        elif is_repair:
            spread.deadline = now + self._rules.repair_seconds
        spread.is_owed = carrier is not None or is_repair
        return carrier is not None

    def on_sent(self, key: str, author: str, seq: int, now: float) -> bool:
        """Record that all of an update was sent to a peer; return whether others are told now."""
        spread = self._spreads.get((author, seq))
        if spread is None or spread.carrier != key or not spread.is_withheld:
            return False
        spread.is_sent = True
        spread.deadline = now + 0.5 * (spread.deadline - spread.started_at)
        return True

    def is_carried(self, key: str, author: str, seq: int) -> bool:
        """Return whether a peer is to receive an update from its carrier and not from here."""
        spread = self._spreads.get((author, seq))
        return spread is not None and bool(spread.carrier) and spread.carrier != key

    def withheld(self, key: str) -> dict[str, int]:
        """Return, by author, the first update of this machine that a peer is not told of yet."""
        first: dict[str, int] = {}
        for spread in self._spreads.values():
            if spread.is_withheld and spread.carrier != key:
                first[spread.author] = min(spread.seq, first.get(spread.author, spread.seq))
        return first

    @property
    def next_wakeup(self) -> float:
        """When the next update is given up, in seconds; inf if none is waited for."""
        return min((spread.deadline for spread in self._spreads.values()), default=math.inf)

    @property
    def owes_update(self) -> bool:
        """Return whether this machine may have to send an update to everybody yet.

        Its carrier is being sent it, or nobody reports it, or peers lack it since a carrier
        failed. Safe from any thread.
        """
        return any(spread.is_owed for spread in list(self._spreads.values()))

    def release_all(self) -> list[Spread]:
        """Return the updates that others were not told of, and withhold nothing any longer."""
        withheld = [spread for spread in self._spreads.values() if spread.is_withheld]
        self._spreads.clear()
        return withheld

    def review(self, links: Links, now: float) -> tuple[list[Spread], list[Spread]]:
        """Find out what the linked peers have by now, and which carriers have failed.

        Returns:
            The updates that the other peers are told of from now on, and those that their carriers
            did not deliver.
        """
        told: list[Spread] = []
        failed: list[Spread] = []
        oldest = now - self._rules.silent_seconds
        for name, spread in list(self._spreads.items()):
            spread.waiting = {
                key
                for key in spread.waiting
                if key in links and links[key].vector.get(spread.author, 0) < spread.seq
            }
            carrier = links.get(spread.carrier)
            is_here = carrier is not None and carrier.last_received_at > oldest
            has_it = carrier is not None and carrier.vector.get(spread.author, 0) >= spread.seq
            if spread.waiting and now < spread.deadline and (is_here or not spread.carrier):
                has_arrived = len(spread.waiting) < spread.targets
                if spread.carrier and (has_arrived or has_it):
                    spread.is_owed = False
                if spread.is_withheld and (spread.is_sent or has_it):
                    spread.has_carrier_it = True
                    told.append(spread)
                continue
            del self._spreads[name]
            is_trusted = not spread.carrier or self._judge(spread, links, now)
            if spread.waiting and not (is_trusted and is_here):
                if spread.carrier:
                    failed.append(spread)
                continue
            # Peers that are late know of it, and request it. The next update may take longer.
            self._usual_seconds += 0.5 * (now - spread.started_at - self._usual_seconds)
            if spread.is_withheld:
                told.append(spread)
        return told, failed

    def _judge(self, spread: Spread, links: Links, now: float) -> bool:
        """Let a carrier count for as much as it delivered; return whether it is still trusted."""
        record = self._records.pop(spread.volunteer, None) or _CarrierRecord()
        share = spread.carried_share
        is_trusted = share >= self._rules.min_share
        if not is_trusted:
            record.failures += 1
            record.paused_until = now + self._rules.pauses.pause_seconds(record.failures - 1)
            for link in links.values():
                if link.volunteer == spread.volunteer:
                    link.relayed = 0  # it has to be seen to relay again
        elif share < 1.0:
            record.credit = max(self._rules.min_credit, share * record.credit)
        else:
            record.failures = 0
            record.credit = min(1.0, self._rules.recovery * record.credit)
        store_newest(self._records, spread.volunteer, record, FEW)
        return is_trusted
