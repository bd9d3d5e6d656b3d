"""Another mirror, over HTTPS: one signed request, one checked answer, bounded in bytes and in seconds."""

import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from barnraise.errors import MessageError
from barnraise.protocol.coordinator_messages import MirrorView, Problem, ServerTime
from barnraise.protocol.messages import Signed
from barnraise.protocol.mirror_list import MirrorEntry
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
    MirrorLists,
    PrivateDataRequest,
    UsedCodes,
)

MAX_ANSWER = 16 << 20  # bytes; a page of events comes nowhere near it
BETWEEN, WHOLE = 5.0, 20.0  # seconds between two pieces of an answer, and for all of it
KNOCK = 1.5  # …and for one who was silent to say that it is there again
S = TypeVar("S", bound=BaseModel)


class PeerError(Exception):
    """No answer that can be used. `sentence` names the mirror and why; nothing was taken from it. `silent`: there was
    no answer at all, or that its database is away and one shall ask again in a moment."""

    def __init__(self, sentence: str, silent: bool = False):
        self.sentence, self.unreachable = sentence, silent
        super().__init__(sentence)


class MirrorClient:
    """Raises PeerError from every method. Requests are addressed to `key`, and by `ahead` in the other's time, learnt
    from a signed 401."""

    def __init__(self, url: str, key: str = "", name: str = ""):
        self.url, self.key, self.name = url.rstrip("/"), key, name or url
        self._ahead = 0.0
        self._http = httpx.Client(
            timeout=BETWEEN, verify=_trusted(), headers={"User-Agent": "barnraise-mirror"}
        )

    @classmethod
    def for_listed(cls, listed: MirrorEntry) -> "MirrorClient":
        return cls(listed.url, listed.key, listed.name)

    def __enter__(self) -> "MirrorClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def fetch_view(self) -> MirrorView:
        """Who answers there."""
        view = self.request("GET", "/mirror", None, MirrorView)
        if self.key and view.key != self.key:
            raise PeerError(
                f"{self.name} is the mirror {view.key[:8]}, and the list says {self.key[:8]}"
            )
        return view

    def fetch_heads(self) -> LogHeads:
        """How far it has come, signed by its key and for us."""
        signed = self.request("GET", "/mirrors/heads", None, Signed)
        try:
            found = open_signed(signed, "heads", LogHeads, self.key)
        except MessageError as error:
            raise PeerError(f"{self.name}: {error}") from None
        if (found.mirror, found.to) != (self.key, site_identity.identity().key):
            raise PeerError(f"{self.name} answered with heads that are not for this site")
        if not set(found.protocols) & set(PROTOCOLS):
            ours = ", ".join(map(str, PROTOCOLS))
            raise PeerError(
                f"{self.name} speaks the protocols {found.protocols} between mirrors, and this site {ours}"
            )
        return found

    def fetch_lists(self, after: int) -> MirrorLists:
        return self.request("GET", f"/mirrors/list?after={after}", None, MirrorLists)

    def fetch_events(self, origin: str, after: int, most: int = PAGE_EVENTS) -> LogPart:
        return self.request(
            "GET", f"/mirrors/logs/{origin}?after={after}&most={most}", None, LogPart
        )

    def fetch_fork_evidence(self) -> ForkEvidenceList:
        return self.request("GET", "/mirrors/fork-evidence", None, ForkEvidenceList)

    def fetch_private_data(self, digests: list[str]) -> list[PrivateRecord]:
        lock = RequestKey()
        answer = self.request(
            "POST",
            "/mirrors/private-data",
            PrivateDataRequest(digests=digests, key=lock.key),
            EncryptedPrivateData,
        )
        try:
            return lock.decrypt(answer)
        except MessageError as error:
            raise PeerError(f"{self.name}: {error}") from None

    def send_change_notice(self) -> None:
        self.request("POST", "/mirrors/change-notice", ChangeNotice(), Acknowledgement)

    def send_used_codes(self, marks: list[str]) -> None:
        self.request("POST", "/mirrors/used-codes", UsedCodes(marks=marks), Acknowledgement)

    def request(
        self, method: str, path: str, message: BaseModel | None, shape: type[S], again: bool = True
    ) -> S:
        """What it answers to one request, which must be of this shape."""
        whole, body = (
            "/api/v1" + path,
            b"" if message is None else message.model_dump_json().encode(),
        )
        headers = {"Content-Type": "application/json"} if body else {}
        if self.key:
            now = time.time() + self._ahead
            token = site_identity.identity().sign_request(self.key, method, whole, body, now)
            headers["Authorization"] = f"Barnraise {token}"
        status, answer = self._exchange(method, whole, body, headers)
        try:
            if status == 200:
                return shape.model_validate_json(answer)
            problem = Problem.model_validate_json(answer)
        except ValidationError:
            cut = (
                " (it may be cut off)"
                if answer[:1] == b"{" and not answer.rstrip().endswith(b"}")
                else ""
            )
            raise PeerError(
                f"{self.name} answered {status} with something that no mirror says{cut}"
            ) from None
        if status == 401 and again and problem.time and self._learn_time(problem.time):
            return self.request(method, path, message, shape, again=False)
        raise PeerError(f"{self.name} refuses: {problem.error}", silent=status == 503)

    def _exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        answer, until = bytearray(), time.monotonic() + WHOLE
        try:
            with self._http.stream(
                method, self.url + path, content=body, headers=headers
            ) as response:
                for piece in response.iter_bytes():
                    answer += piece
                    if len(answer) > MAX_ANSWER:
                        raise PeerError(
                            f"{self.name} sent more than {MAX_ANSWER:,} bytes and was cut off"
                        )
                    if time.monotonic() > until:
                        raise PeerError(
                            f"{self.name} takes more than {WHOLE:g} seconds for one answer and was cut off"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerError(
                f"{self.name} does not answer ({error or type(error).__name__})", silent=True
            ) from None
        return response.status_code, bytes(answer)

    def _learn_time(self, signed: Signed) -> bool:
        try:
            told = open_signed(signed, "time", ServerTime, self.key)
        except MessageError:
            return False
        before, self._ahead = self._ahead, told.time - time.time()
        return abs(self._ahead - before) > 1.0


@lru_cache(maxsize=1)
def _trusted() -> ssl.SSLContext:
    """Whose certificates are believed, read once: to read them for each request cost more than all else about it."""
    return httpx.create_ssl_context()


def find_reachable(silent: Sequence[MirrorEntry]) -> list[MirrorEntry]:
    """Which of these are there again: all are asked at once who they are, so that it costs no more than a moment."""
    if not silent:
        return []
    with ThreadPoolExecutor(len(silent)) as crew:
        return [
            each for each, there in zip(silent, crew.map(_is_there, silent), strict=True) if there
        ]


def _is_there(listed: MirrorEntry) -> bool:
    try:
        url = f"{listed.url.rstrip('/')}/api/v1/mirror"
        return httpx.get(url, timeout=KNOCK, verify=_trusted()).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
