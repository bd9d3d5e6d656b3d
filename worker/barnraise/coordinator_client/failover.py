"""All mirrors of a site as this machine sees them: one that it reports to, the others told where it can be found.

Which one it is follows from both keys (`mirrors.ranked`). When it does not answer, the next takes its place; it is
looked after now and then, each time later, and once it answers again the machine goes back to it. The mirror list
lies on disk, is asked for at every mirror, and is handed to and fro with the peers of a run (`exchange/register.py`).
"""

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from barnraise.coordinator_client.client import Coordinator
from barnraise.durable_io import write_atomically
from barnraise.errors import CoordinatorError, CoordinatorGone, ListError, MessageError
from barnraise.protocol.coordinator_messages import (
    Attestation,
    Directive,
    JoinReply,
    ReportReply,
    RunView,
    TextManifest,
)
from barnraise.protocol.messages import Peer, Signed
from barnraise.protocol.mirror_list import (
    MAX_LISTS_PER_MESSAGE,
    MirrorEntry,
    MirrorList,
    MirrorLists,
    SignedMirrorList,
    merge_chain,
    parse_list,
    rank_mirrors,
)
from barnraise.protocol.reports import HardwareView, Report
from barnraise.protocol.signing import Identity, open_signed
from barnraise.protocol.types import Address
from barnraise.state_dir import Home, Membership

log = logging.getLogger("barnraise.protocol.mirror_list")

KEPT = "mirrors.json"  # in the machine's home
FIRST_WAIT, LONGEST_WAIT = 5.0, 300.0  # seconds until a mirror that did not answer is looked after
ANNOUNCE = 300.0  # seconds between two rounds to all mirrors: where this machine is, and whether there is a new list
REFUSED = (401, 403, 404, 409, 410)  # a mirror that lags behind may say so of what the others know

T = TypeVar("T")


class Choice:
    """Which mirror is asked next. Pure but for its dice; times are the caller's.

    One that failed is away until somebody who looked after it (`due`) says that it is `back`."""

    def __init__(self, machine: str):
        self._machine = machine
        self.order: list[str] = []
        self._failures: dict[str, int] = {}  # in a row
        self._until: dict[str, float] = {}  # of those that are away: when to look after them

    def listed(self, mirrors: Sequence[MirrorEntry]) -> None:
        self.order = [each.key for each in rank_mirrors(self._machine, mirrors)]

    def pick(self) -> str:
        """The first that is not away; where all are, the one to look after first."""
        here = (key for key in self.order if not self.away(key))
        return next(here, None) or min(self.order, key=lambda key: self._until[key])

    def away(self, key: str) -> bool:
        return key in self._until

    def due(self, now: float) -> list[str]:
        return [key for key in self.order if self._until.get(key, math.inf) <= now]

    def next_at(self) -> float:
        """When one is due; inf: none is away."""
        return min((self._until[key] for key in self.order if self.away(key)), default=math.inf)

    def failed(self, key: str, now: float) -> None:
        self._failures[key] = failures = min(16, self._failures.get(key, 0) + 1)
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1))
        self._until[key] = now + wait * random.uniform(0.5, 1.5)

    def back(self, key: str) -> None:
        """It seems to answer again."""
        self._until.pop(key, None)

    def answered(self, key: str) -> None:
        """…and did what it was asked."""
        self._until.pop(key, None)
        self._failures.pop(key, None)


@dataclass(frozen=True)
class Whereabouts:
    """What mirrors are told of this machine in a run."""

    addresses: tuple[Address, ...] = ()
    hardware: HardwareView | None = None


class Mirrored:
    """Speaks as a `Coordinator` does. Calls from the reporter's thread and from whoever enters a run are one at a
    time; a thread of its own goes round the other mirrors once reports began, until `close`."""

    def __init__(
        self,
        membership: Membership,
        identity: Identity,
        path: Path,
        clock: Callable[[], float] = time.time,
    ):
        """`path`: where the list is kept."""
        self.identity, self._path, self._clock = identity, path, clock
        mirror = membership.mirror
        self._own = MirrorEntry.model_construct(
            key=mirror.key, url=membership.url, name=mirror.name, admitted=0.0
        )
        self._lock = threading.RLock()
        self._clients: dict[str, Coordinator] = {}
        self._choice = Choice(identity.key)
        self._vouched = ""  # the digest of the list that our mirror names
        self._refusals: dict[str, str] = {}
        self._whereabouts: dict[str, Whereabouts] = {}  # by run
        self._joined: set[tuple[str, str]] = set()  # (mirror, run)
        self._met: list[Peer] = []  # of whom other mirrors told
        self._wake, self._closed = threading.Event(), threading.Event()
        self._round_at = 0.0  # when all are told again (monotonic)
        self._thread: threading.Thread | None = None
        self.chain = self._kept()
        self._listed()
        self._current = self._choice.pick()

    @classmethod
    def known(cls, home: Home) -> "Mirrored":
        return cls(home.membership, home.identity, home.path / KEPT)

    # ---- as a coordinator

    @property
    def mirror(self) -> str:
        """The key of the one that was asked last."""
        return self._current

    @property
    def keys(self) -> frozenset[str]:
        """Of all that may direct this machine."""
        return frozenset(self._choice.order) | {self._own.key}

    @property
    def url(self) -> str:
        return self._client(self._current).url

    @property
    def bytes(self) -> int:
        return sum(client.bytes for client in list(self._clients.values()))

    def now(self) -> float:
        return self._client(self._current).now()

    def turn(self) -> str:
        """Settles which mirror the next calls go to; its key."""
        with self._lock:
            self._current = self._choice.pick()
            return self._current

    @property
    def ready(self) -> bool:
        """Whether the mirror of the next turn is thought to answer."""
        return not self._choice.away(self._choice.pick())

    def run(self, run: str) -> RunView:
        return self._anywhere(lambda client: client.run(run))

    def join(
        self, run: str, addresses: list[Address], hardware: HardwareView | None = None
    ) -> JoinReply:
        self._whereabouts[run] = Whereabouts(tuple(addresses), hardware)
        reply = self._anywhere(lambda client: client.join(run, addresses, hardware))
        self._joined.add((self._current, run))
        self._heed(reply.directive)
        return reply

    def manifest(self, run: str, manifest: TextManifest) -> RunView:
        return self._anywhere(lambda client: client.manifest(run, manifest))

    def report(
        self,
        run: str,
        reports: list[Report],
        heeds: Sequence[str] = (),
        witnessed: Sequence[Attestation] = (),
    ) -> ReportReply:
        hardware = self._whereabouts.get(run, Whereabouts()).hardware
        self._whereabouts[run] = Whereabouts(tuple(reports[-1].addresses), hardware)
        self._go_round()
        joined = self._enter(run)
        reply = self._here(lambda client: client.report(run, reports, heeds, witnessed))
        self._heed(reply.directive)
        with self._lock:
            peers, self._met = [*reply.peers, *self._met], []
        if joined:
            peers += joined.peers
        return reply.model_copy(
            update={"ticket": reply.ticket or (joined and joined.ticket), "peers": peers[:64]}
        )

    def listen(self, run: str) -> ReportReply:
        self._enter(run)
        reply = self._here(lambda client: client.listen(run))
        self._heed(reply.directive)
        return reply

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        for client in list(self._clients.values()):
            client.close()

    # ---- the list

    @property
    def newest(self) -> MirrorList | None:
        return parse_list(self.chain[-1]) if self.chain else None

    def heard(self, lists: Sequence[SignedMirrorList]) -> None:
        """Takes what a mirror or a peer told, if it is newer and holds; else says why in the log."""
        with self._lock:
            try:
                chain = merge_chain(self.chain, lists, self.now(), self._vouched)[
                    -MAX_LISTS_PER_MESSAGE:
                ]
            except ListError as error:
                log.warning("%s", error)
                return
            if chain == self.chain:
                return
            self.chain = chain
            self._listed()
            self._now()
        log.info("the mirrors are now %s", ", ".join(each.url for each in self._live()))
        try:
            write_atomically(
                self._path, MirrorLists(lists=chain).model_dump_json(indent=1).encode()
            )
        except OSError as error:
            log.error("the mirror list could not be kept: %s", error)

    def _kept(self) -> list[SignedMirrorList]:
        """What lies on disk, where it is of the mirror that knows this machine."""
        try:
            chain = MirrorLists.model_validate_json(self._path.read_bytes()).lists
            return chain if chain and self._own.key in parse_list(chain[-1]).keys else []
        except FileNotFoundError:
            return []
        except (ValidationError, ListError, OSError) as error:
            log.warning(
                "%s cannot be used: the mirrors will be asked for it (%s)", self._path, error
            )
            return []

    def _live(self) -> list[MirrorEntry]:
        newest = self.newest
        return newest.active if newest else [self._own]

    def _listed(self) -> None:
        """The list changed."""
        mirrors = self._live()
        self._choice.listed(mirrors)
        for each in mirrors:
            client = self._clients.get(each.key)
            if client is None or client.url != each.url.rstrip("/"):
                self._clients[each.key] = Coordinator(
                    each.url, self.identity, each.key, self._clock
                )

    def _heed(self, signed: Signed) -> None:
        """A directive names the newest list that its mirror has."""
        try:
            directive = open_signed(signed, "directive", Directive, self._current)
        except MessageError:
            return  # whoever acts on it says so aloud
        newest = self.newest
        if directive.mirror_list_version > (newest.version if newest else 0):
            if newest is None and directive.mirror_list_digest:
                self._vouched = directive.mirror_list_digest
            self._now()

    # ---- asking

    def _client(self, key: str) -> Coordinator:
        return self._clients[key]

    def _here(self, call: Callable[[Coordinator], T]) -> T:
        """Asks the mirror of this turn. One alone that refuses counts as one that does not answer, unless most do."""
        client, key = self._client(self._current), self._current
        try:
            answer = call(client)
        except CoordinatorGone:
            self._failed(key)
            raise
        except CoordinatorError as error:
            order = self._choice.order
            if error.status not in REFUSED:
                raise
            self._refusals[key] = str(error)
            self._joined = {pair for pair in self._joined if pair[0] != key}
            if 2 * len(self._refusals.keys() & set(order)) > len(order):
                raise
            self._failed(key)
            raise CoordinatorGone(
                f"{client.url} refuses, and other mirrors may know better: {error}"
            ) from None
        self._choice.answered(key)
        self._refusals.clear()
        return answer

    def _anywhere(self, call: Callable[[Coordinator], T]) -> T:
        """Asks one mirror after the other until one answers. Raises what the first that refused said, or else the
        last that did not answer."""
        refusal: CoordinatorError | None = None
        for _ in range(len(self._choice.order)):
            self.turn()
            client = self._client(self._current)
            try:
                answer = call(client)
            except CoordinatorGone as error:
                refusal = refusal or error
            except CoordinatorError as error:
                refusal = (
                    error if refusal is None or isinstance(refusal, CoordinatorGone) else refusal
                )
                if error.status not in REFUSED:
                    raise
            else:
                self._choice.answered(self._current)
                return answer
            self._failed(self._current)
        assert refusal is not None
        raise refusal

    def _enter(self, run: str) -> JoinReply | None:
        """A mirror that this machine comes to for the first time has to know where it is."""
        if (
            (self._current, run) in self._joined
            or run not in self._whereabouts
            or len(self._choice.order) < 2
        ):
            return None
        where = self._whereabouts[run]
        reply = self._here(lambda client: client.join(run, list(where.addresses), where.hardware))
        self._joined.add((self._current, run))
        return reply

    # ---- going round

    def _go_round(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._rounds, name="mirrors", daemon=True)
            self._thread.start()

    def _rounds(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            keys = self._choice.due(time.monotonic())
            if time.monotonic() >= self._round_at:
                keys, self._round_at = (
                    list(self._choice.order),
                    time.monotonic() + ANNOUNCE * random.uniform(0.8, 1.2),
                )
            for key in keys:
                if not self._closed.is_set():
                    self._tell(self._client(key))
            self._wake.wait(
                max(0.0, min(self._round_at, self._choice.next_at()) - time.monotonic())
            )

    def _now(self) -> None:
        """The next round is due."""
        self._round_at = 0.0
        self._wake.set()

    def _failed(self, key: str) -> None:
        self._choice.failed(key, time.monotonic())
        self._wake.set()  # somebody has to look after it

    def _tell(self, client: Coordinator) -> None:
        """Asks a mirror for a newer list, and says where this machine is."""
        newest, key = self.newest, client.mirror
        try:
            if lists := client.mirrors(newest.version if newest else 0).lists:
                self.heard(lists)
            for run, where in list(self._whereabouts.items()):
                if key != self._current or self._choice.away(key):
                    reply = client.join(run, list(where.addresses), where.hardware)
                    with self._lock:
                        self._met = [*reply.peers, *self._met][:64]
            self._choice.back(key)
        except CoordinatorError as error:
            self._choice.failed(key, time.monotonic())
            log.debug("%s", error)
