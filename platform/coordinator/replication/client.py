"""Call another mirror over HTTPS: one signed request, one checked answer, both bounded."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel

from barnraise.errors import MessageError
from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.protocol.messages import Signed
from barnraise.protocol.mirror_list import MirrorEntry, MirrorLists
from barnraise.protocol.signed_http import (
    HttpOptions,
    ProblemError,
    RequestFailedError,
    SignedHttpClient,
)
from barnraise.protocol.signing import open_signed
from coordinator.eventlog.private_data import PrivateRecord
from coordinator.lib import site_identity
from coordinator.replication.encryption import RequestKey
from coordinator.replication.protocol import (
    PAGE_EVENTS,
    PROTOCOLS,
    Acknowledgement,
    ChangeNotice,
    EncryptedPrivateData,
    ForkEvidenceList,
    LogHeads,
    LogPart,
    PrivateDataRequest,
    UsedCodes,
)

MAX_ANSWER_BYTES = 16 << 20  # far more than a page of events has
READ_SECONDS = 5.0  # between two pieces of an answer
ANSWER_SECONDS = 20.0  # for a whole answer
PROBE_SECONDS = 1.5  # for an unreachable mirror to answer a probe
PULL_SECONDS = 10.0  # for all answers of one pull in the background
NOTICE_SECONDS = 3.0  # for the answer to a notice
EVENT_SECONDS = 0.002  # of waiting that are no waste for each event that arrives
Answer = TypeVar("Answer", bound=BaseModel)


class PeerError(Exception):
    """A mirror gave no usable answer; nothing of it was stored.

    Attributes:
        sentence: Names the mirror and the reason.
        unreachable: There was no answer at all, or its database is away and the request may be
            repeated in a moment.
    """

    def __init__(self, sentence: str, unreachable: bool = False) -> None:
        self.sentence = sentence
        self.unreachable = unreachable
        super().__init__(sentence)


class MirrorClient:
    """Call one mirror. Every method raises PeerError.

    Requests are signed by this site's key and addressed to `key`, the mirror's.

    Args:
        url: the mirror's address.
        key: its key; "" while it is not known.
        name: its name, for messages.
        most_seconds: that all requests together may wait in vain; further ones are refused. In the
            background other tasks wait behind them.
    """

    def __init__(
        self, url: str, key: str = "", name: str = "", most_seconds: float = math.inf
    ) -> None:
        self.key = key
        self.name = name or url
        self._most_seconds = most_seconds
        self._waited = 0.0
        self._events = 0
        options = HttpOptions(
            user_agent="barnraise-mirror",
            timeout_seconds=min(READ_SECONDS, most_seconds),
            max_seconds=min(ANSWER_SECONDS, most_seconds),
            max_bytes=MAX_ANSWER_BYTES,
        )
        self._http = SignedHttpClient(url, site_identity.identity(), key, self.name, options)

    @classmethod
    def for_listed(cls, entry: MirrorEntry, most_seconds: float = math.inf) -> "MirrorClient":
        """Create the client of a mirror of the list."""
        return cls(entry.url, entry.key, entry.name, most_seconds)

    @property
    def is_limited(self) -> bool:
        """Whether it works in the background, for a bounded time."""
        return math.isfinite(self._most_seconds)

    @property
    def wasted_seconds(self) -> float:
        """How long the mirror kept this site waiting, but for the events that came."""
        return max(0.0, self._waited - self._events * EVENT_SECONDS)

    def __enter__(self) -> "MirrorClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def fetch_view(self) -> MirrorView:
        """Fetch who answers at this address; it must have the expected key."""
        view = self.request("GET", "/mirror", None, MirrorView)
        if self.key and view.key != self.key:
            raise PeerError(
                f"{self.name} is the mirror {view.key[:8]}, and the list says {self.key[:8]}"
            )
        return view

    def fetch_heads(self) -> LogHeads:
        """Fetch how far its logs are, signed by its key and for this site."""
        signed = self.request("GET", "/mirrors/heads", None, Signed)
        try:
            heads = open_signed(signed, "heads", LogHeads, self.key)
        except MessageError as error:
            raise PeerError(f"{self.name}: {error}") from None
        if (heads.mirror, heads.to) != (self.key, site_identity.identity().key):
            raise PeerError(f"{self.name} answered with heads that are not for this site")
        if not set(heads.protocols) & set(PROTOCOLS):
            ours = ", ".join(map(str, PROTOCOLS))
            raise PeerError(
                f"{self.name} speaks the protocols {heads.protocols} between mirrors, and this "
                f"site {ours}"
            )
        return heads

    def fetch_lists(self, after: int) -> MirrorLists:
        """Fetch the mirror lists that lead from version `after` to the newest one."""
        return self.request("GET", f"/mirrors/list?after={after}", None, MirrorLists)

    def fetch_events(self, origin: str, after: int, limit: int = PAGE_EVENTS) -> LogPart:
        """Fetch events of a log from number `after` + 1."""
        part = self.request(
            "GET", f"/mirrors/logs/{origin}?after={after}&most={limit}", None, LogPart
        )
        self._events += len(part.events)
        return part

    def fetch_fork_evidence(self) -> ForkEvidenceList:
        """Fetch the pairs of events that prove forks."""
        return self.request("GET", "/mirrors/fork-evidence", None, ForkEvidenceList)

    def fetch_private_data(self, digests: list[str]) -> list[PrivateRecord]:
        """Fetch private data by digest, encrypted for this one request."""
        request_key = RequestKey()
        message = PrivateDataRequest(digests=digests, key=request_key.key)
        answer = self.request("POST", "/mirrors/private-data", message, EncryptedPrivateData)
        try:
            return request_key.decrypt(answer)
        except MessageError as error:
            raise PeerError(f"{self.name}: {error}") from None

    def send_change_notice(self) -> None:
        """Send word that this site recorded events."""
        self.request("POST", "/mirrors/change-notice", ChangeNotice(), Acknowledgement)

    def send_used_codes(self, marks: list[str]) -> None:
        """Send marks of one-time codes that were used here."""
        self.request("POST", "/mirrors/used-codes", UsedCodes(marks=marks), Acknowledgement)

    def request(
        self, method: str, path: str, message: BaseModel | None, shape: type[Answer]
    ) -> Answer:
        """Send one signed request and return its answer, which must have this shape."""
        if self.wasted_seconds >= self._most_seconds:
            raise PeerError(
                f"{self.name} kept this site waiting for {self._most_seconds:g} seconds: the rest "
                "is pulled later"
            )
        started = time.monotonic()
        try:
            return self._http.request(method, path, message, shape)
        except RequestFailedError as error:
            raise PeerError(str(error), unreachable=error.status == 0) from None
        except ProblemError as error:
            sentence = f"{self.name} refuses: {error.problem.error}"
            raise PeerError(sentence, unreachable=error.status == 503) from None
        finally:
            self._waited += time.monotonic() - started


def find_reachable(entries: Sequence[MirrorEntry]) -> list[MirrorEntry]:
    """Probe mirrors in parallel; return those that answer within PROBE_SECONDS."""
    if not entries:
        return []
    with ThreadPoolExecutor(len(entries)) as executor:
        answers = executor.map(_probe, entries)
        return [entry for entry, answer in zip(entries, answers, strict=True) if answer]


def _probe(entry: MirrorEntry) -> bool:
    try:
        with MirrorClient(entry.url, name=entry.name, most_seconds=PROBE_SECONDS) as client:
            client.fetch_view()
    except PeerError:
        return False
    return True
