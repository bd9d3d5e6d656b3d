"""Another mirror over real HTTP, small enough to break at will: it serves one log, and answers that a test chooses."""

import ssl
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import jwt
from helpers.event_log_builder import LogBuilder

from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.protocol.mirror_list import MirrorEntry, MirrorLists, SignedMirrorList, parse_list
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message
from coordinator.lib import site_identity
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
    """`routes` maps "METHOD /path" (without /api/v1 and the query) to (query, who asks) → a message, (status, bytes) or
    pieces; what was posted is query["body"]. `asked`: what was asked for. `lists`, `proofs`, `protocols`, `ahead`: what
    it says of itself."""

    def __init__(self, log: LogBuilder, context: ssl.SSLContext | None = None):
        self.log, self.identity = log, log.identity
        self.lists: list[SignedMirrorList] = []
        self.proofs: list[ForkEvidence] = []
        self.protocols, self.clock_offset, self.requests, self.page_size = [1], 0.0, [], 100
        self.routes: dict[str, Callable] = {
            "GET /mirror": lambda query, who: MirrorView(
                key=self.identity.key, name="small", protocols=[1], time=time.time()
            ),
            "GET /mirrors/heads": lambda query, who: self.identity.sign("heads", self.heads(who)),
            "GET /mirrors/list": lambda query, who: MirrorLists(
                lists=[
                    each for each in self.lists if parse_list(each).version > int(query["after"])
                ]
            ),
            f"GET /mirrors/logs/{log.origin}": self.page,
            "GET /mirrors/fork-evidence": lambda query, who: ForkEvidenceList(proofs=self.proofs),
            "POST /mirrors/change-notice": lambda query, who: Acknowledgement(),
        }
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = ours.answer(
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

            def log_message(self, *words) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if context:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "https" if context else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        serve = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        serve.start()

    @property
    def list_entry(self) -> MirrorEntry:
        return MirrorEntry(key=self.identity.key, url=self.url, name="the small one", admitted=1.0)

    def heads(self, who: str, **changed) -> LogHeads:
        last = self.log.events[-1]
        fields = {
            "protocols": self.protocols, "mirror": self.identity.key, "to": who, "time": time.time() + self.clock_offset,
            "mirrors": max((parse_list(each).version for each in self.lists), default=0), "proofs": len(self.proofs),
            "state": "0" * 64,
            "heads": {self.log.origin: LogHead(seq=len(self.log.events), digest=digest(last.body))},
        }  # fmt: skip
        return LogHeads(**{**fields, **changed})

    def page(self, query: dict[str, str], who: str) -> LogPart:
        after = int(query["after"])
        some = self.log.events[after : after + self.page_size]
        return LogPart(events=some, more=after + len(some) < len(self.log.events))

    def answer(
        self, method: str, path: str, authorization: str, posted: bytes = b""
    ) -> tuple[int, Answer]:
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
        found = self.routes[route](query | {"body": posted.decode()}, who)
        if isinstance(found, Message):
            return 200, found.model_dump_json().encode()
        return found if isinstance(found, tuple) else (200, found)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def local_entry(**fields) -> MirrorEntry:
    """This site, as a list names it."""
    return MirrorEntry(
        key=site_identity.identity().key,
        url="https://here.example.org",
        name="here",
        admitted=1.0,
        **fields,
    )


def pull(small: FakeMirror) -> pull_module.PullResult:
    return pull_module.pull_from(small.list_entry)
