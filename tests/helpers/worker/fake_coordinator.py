"""A fake coordinator: real HTTP and signed requests, with responses that a test chooses."""

import json
import time
from collections.abc import Callable

from helpers.network.local_server import LocalServer, QuietHandler
from pydantic import BaseModel

from barnraise.errors import MessageError
from barnraise.protocol.coordinator_messages import (
    Directive,
    MirrorView,
    Problem,
    ReportReply,
    Reports,
    ServerTime,
)
from barnraise.protocol.enums import RunStatus
from barnraise.protocol.signing import Identity, check_request
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.state_dir import SiteMembership, StateDir

RUN = "01890000-0000-7000-8000-000000000001"
MACHINE = "01890000-0000-7000-8000-00000000000a"


def enrol(home: StateDir, url: str, key: str, machine: str = MACHINE) -> None:
    """Let a state directory belong to a machine that is enrolled at a site with this key."""
    mirror = MirrorView(key=key, name="small", protocols=[1], time=0)
    home.save_membership(SiteMembership(url=url, mirror=mirror, machine=machine))


class FakeCoordinator:
    """A coordinator on a thread.

    Attributes:
        routes: "METHOD /path" → a function of the body that returns a message or (status, message).
        clock_offset: Seconds by which its clock is ahead.
        reports: The reports that arrived, by number.
        requests: The routes that were requested, in order.
        acknowledged: The number up to which it confirms reports.
        failing: (status, sentence) for every report, or None.
        verdicts: Verdicts that it sends until the machine confirms them.
        verdicts_after: The number of the last verdict that the machine confirmed.
        directive: The fields of the directive that it signs.
        issued: When the directive was issued; None for now.
    """

    def __init__(self, identity: Identity | None = None, run: str = RUN):
        self.identity = identity or Identity(b"s" * 32)
        self.verdicts: list[SignedVerdict] = []
        self.verdicts_after = 0
        self.clock_offset = 0.0
        self.acknowledged = 0
        self.failing: tuple[int, str] | None = None
        self.reports: dict[int, BaseModel] = {}
        self.requests: list[str] = []
        self.directive = dict(run=run, machine=MACHINE, status=RunStatus.TRAINING, report_every=0.2)
        self.issued: float | None = None
        self.routes: dict[str, Callable] = {
            "GET /mirror": lambda body: MirrorView(
                key=self.identity.key, name="small", protocols=[1], time=self.now()
            ),
            f"POST /runs/{run}/reports": self._report,
        }
        coordinator = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = coordinator.answer(
                    self.command, self.path, body, self.headers.get("Authorization", "")
                )
                data = answer if isinstance(answer, bytes) else answer.model_dump_json().encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

        self._server = LocalServer(Handler)
        self.port, self.url = self._server.port, self._server.url

    def now(self) -> float:
        return time.time() + self.clock_offset

    def open(self) -> None:
        """Start listening, at the same port as before."""
        self._server.open()

    def close(self) -> None:
        self._server.close()

    def answer(self, method: str, path: str, body: bytes, authorization: str):
        """Answer one request with a status and a message or bytes."""
        route = f"{method} {path.removeprefix('/api/v1')}"
        self.requests.append(route)
        if authorization:
            try:
                check_request(
                    authorization.removeprefix("Barnraise "),
                    self.identity.key,
                    method,
                    path,
                    body,
                    self.now(),
                )
            except MessageError as error:
                now = ServerTime(mirror=self.identity.key, time=self.now())
                return 401, Problem(error=str(error), time=self.identity.sign("time", now))
        if route not in self.routes:
            return 404, Problem(error=f"there is nothing at {path}")
        answer = self.routes[route](body)
        return answer if isinstance(answer, tuple) else (200, answer)

    def signed_directive(self):
        issued = self.now() if self.issued is None else self.issued
        return self.identity.sign("directive", Directive(**self.directive, issued=issued))

    def _report(self, body: bytes):
        if self.failing:
            return self.failing[0], Problem(error=self.failing[1])
        received = Reports.model_validate(json.loads(body))
        self.verdicts_after = received.verdicts_after
        for report in received.reports:
            self.reports[report.seq] = report
        return ReportReply(
            acknowledged=self.acknowledged,
            directive=self.signed_directive(),
            verdicts=self.verdicts[received.verdicts_after :][:2],
            verdicts_until=min(len(self.verdicts), received.verdicts_after + 2),
        )
