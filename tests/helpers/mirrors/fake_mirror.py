"""Serve another mirror's log over real HTTP, with answers that a test can replace."""

import ssl
import time
from collections.abc import Callable, Iterable
from urllib.parse import parse_qs, urlsplit

import jwt
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.mirror_lists import signed_list
from helpers.network.local_server import LocalServer, QuietHandler

from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.protocol.mirror_list import (
    Expulsion,
    MirrorEntry,
    MirrorLists,
    SignedMirrorList,
    parse_list,
)
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication import pull as pull_module
from coordinator.replication.protocol import (
    Acknowledgement,
    ForkEvidence,
    ForkEvidenceList,
    LogHead,
    LogHeads,
    LogPart,
)

Answer = bytes | Iterable[bytes]


class FakeMirror:
    """Serve one log, mirror lists and fork proofs.

    Attributes:
        routes: Maps "METHOD /path", without /api/v1 and the query, to a function of the query and
            the sender's key. It returns a message, (status, bytes) or an iterable of pieces. The
            request's body is query["body"].
        log_route: The route of the log.
        requests: The routes that were requested, in order.
        lists: The mirror lists that it serves.
        proofs: The fork proofs that it serves.
        protocols: The protocols that it claims to speak.
        clock_offset: Seconds by which its clock is ahead.
        page_size: Most events in one page of the log.
    """

    def __init__(self, log: LogBuilder, context: ssl.SSLContext | None = None):
        self.log = log
        self.identity = log.identity
        self.lists: list[SignedMirrorList] = []
        self.proofs: list[ForkEvidence] = []
        self.protocols = [1]
        self.clock_offset = 0.0
        self.requests: list[str] = []
        self.page_size = 100
        self.log_route = f"GET /mirrors/logs/{log.origin}"
        self.routes: dict[str, Callable] = {
            "GET /mirror": lambda query, who: MirrorView(
                key=self.identity.key, name="small", protocols=[1], time=time.time()
            ),
            "GET /mirrors/heads": lambda query, who: self.identity.sign("heads", self.heads(who)),
            "GET /mirrors/list": lambda query, who: MirrorLists(
                lists=[
                    signed
                    for signed in self.lists
                    if parse_list(signed).version > int(query["after"])
                ]
            ),
            self.log_route: self.page,
            "GET /mirrors/fork-evidence": lambda query, who: ForkEvidenceList(proofs=self.proofs),
            "POST /mirrors/change-notice": lambda query, who: Acknowledgement(),
        }
        mirror = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = mirror.answer(
                    self.command, self.path, self.headers.get("Authorization", ""), posted
                )
                self.send_response(status)
                self.end_headers()
                try:
                    for piece in [answer] if isinstance(answer, bytes) else answer:
                        self.wfile.write(piece)
                except OSError:
                    return

            do_POST = do_GET

        self._server = LocalServer(Handler, context)
        self.url = self._server.url

    @property
    def list_entry(self) -> MirrorEntry:
        """Return its entry in a mirror list."""
        return MirrorEntry(key=self.identity.key, url=self.url, name="the small one", admitted=1.0)

    def publish_list(self) -> None:
        """Let the first list name this site and this mirror."""
        first = signed_list(1, local_entry(), self.list_entry)
        mirror_list.ingest_lists([first], vouched=first.digest)

    def sign_expulsion(self, at: float = 1.0, **fields) -> SignedMirrorList:
        """Return a second list, of this site and this mirror, that expels the mirror."""
        expulsion = Expulsion(at=at, **fields)
        expelled = self.list_entry.model_copy(update={"expelled": expulsion})
        return signed_list(2, local_entry(), expelled)

    def heads(self, who: str, **changed) -> LogHeads:
        """Return its log heads for the mirror `who`; `changed` replaces fields."""
        last = self.log.events[-1]
        fields = {
            "protocols": self.protocols,
            "mirror": self.identity.key,
            "to": who,
            "time": time.time() + self.clock_offset,
            "mirrors": max((parse_list(signed).version for signed in self.lists), default=0),
            "proofs": len(self.proofs),
            "state": "0" * 64,
            "heads": {self.log.origin: LogHead(seq=len(self.log.events), digest=digest(last.body))},
        }
        return LogHeads(**{**fields, **changed})

    def page(self, query: dict[str, str], who: str) -> LogPart:
        """Return the page of the log that a request asks for."""
        after = int(query["after"])
        events = self.log.events[after : after + self.page_size]
        return LogPart(events=events, more=after + len(events) < len(self.log.events))

    def answer(
        self, method: str, path: str, authorization: str, posted: bytes = b""
    ) -> tuple[int, Answer]:
        """Answer one request with a status and a body."""
        parts = urlsplit(path)
        route = f"{method} {parts.path.removeprefix('/api/v1')}"
        self.requests.append(route)
        who = (
            jwt.get_unverified_header(authorization.partition(" ")[2])["kid"]
            if authorization
            else ""
        )
        if route not in self.routes:
            return 404, b'{"error": "there is nothing at this address"}'
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        answer = self.routes[route](query | {"body": posted.decode()}, who)
        if isinstance(answer, Message):
            return 200, answer.model_dump_json().encode()
        return answer if isinstance(answer, tuple) else (200, answer)

    def close(self) -> None:
        """Stop the server."""
        self._server.close()


def local_entry(**fields) -> MirrorEntry:
    """Return this site's entry in a mirror list."""
    return MirrorEntry(
        key=site_identity.identity().key,
        url="https://here.example.org",
        name="here",
        admitted=1.0,
        **fields,
    )


def pull(mirror: FakeMirror) -> pull_module.PullResult:
    """Pull from the mirror once."""
    return pull_module.pull_from(mirror.list_entry)
