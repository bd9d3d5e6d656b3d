"""A worker's side of the coordinator's API: one signed request, one checked answer."""

import secrets
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from barnraise import __version__
from barnraise.errors import CoordinatorError, CoordinatorGone, MessageError
from barnraise.protocol.coordinator_messages import (
    Attestation,
    Enrolment,
    EnrolmentRequest,
    EnrolmentStatus,
    JoinReply,
    JoinRequest,
    MachineDescription,
    MirrorView,
    Problem,
    ReportReply,
    Reports,
    RunPage,
    RunView,
    ServerTime,
    TextManifest,
)
from barnraise.protocol.messages import Signed
from barnraise.protocol.mirror_list import MirrorLists, SignedMirrorList
from barnraise.protocol.reports import HardwareView, Report
from barnraise.protocol.signing import Identity, M, open_signed
from barnraise.protocol.types import Address, Message
from barnraise.state_dir import Membership

SECONDS = 15.0  # an answer that takes longer is none
MAX_ANSWER = 1 << 20  # bytes; no message of the API comes near it


class Coordinator:
    """One coordinator, as this machine sees it. Raises CoordinatorError with the site's sentence, or CoordinatorGone.

    `mirror` is the key learnt at login: it is what requests are addressed to, so that one coordinator cannot pass them
    on to another. A PC with a wrong clock signs with the server's time, learnt from a signed 401.
    """

    def __init__(
        self, url: str, identity: Identity, mirror: str = "", clock: Callable[[], float] = time.time
    ):
        self.url = url.rstrip("/")
        self.identity = identity
        self.mirror = mirror
        self.bytes = 0  # bodies, both ways
        self._clock = clock
        self._ahead = 0.0  # the server's clock minus ours
        self._http = httpx.Client(
            timeout=SECONDS, headers={"User-Agent": f"barnraise/{__version__}"}
        )

    @classmethod
    def known(cls, membership: Membership, identity: Identity) -> "Coordinator":
        return cls(membership.url, identity, membership.mirror.key)

    @property
    def keys(self) -> frozenset[str]:
        """Of all that may direct this machine."""
        return frozenset({self.mirror})

    def turn(self) -> str:
        """The key of the mirror that the next calls go to: this one, always."""
        return self.mirror

    @property
    def ready(self) -> bool:
        """Whether somebody looked and found that it answers: nobody does, between two calls."""
        return False

    @property
    def chain(self) -> list[SignedMirrorList]:
        """The mirror lists held: none, where there is one coordinator alone."""
        return []

    def heard(self, lists: Sequence[SignedMirrorList]) -> None:
        """Nothing: what it told when it was met is all that is believed."""

    def now(self) -> float:
        """Seconds since 1970 by the coordinator's clock, as far as it is known."""
        return self._clock() + self._ahead

    def meet(self) -> MirrorView:
        """Who answers at this URL; from here on its key is the one this client trusts."""
        view = self._ask("GET", "/mirror", None, MirrorView)
        self.mirror = view.key
        self._ahead = view.time - self._clock()
        return view

    def enrol(self, machine: MachineDescription) -> Enrolment:
        request = EnrolmentRequest(
            mirror=self.mirror, key=self.identity.key, machine=machine, issued=self.now()
        )
        return self._ask("POST", "/enrolments", self.identity.sign("enrolment", request), Enrolment)

    def enrolment(self, code: str) -> EnrolmentStatus:
        return self._ask("GET", f"/enrolments/{quote(code, safe='')}", None, EnrolmentStatus)

    def runs(self, after: str | None = None) -> RunPage:
        return self._ask("GET", "/runs" + (f"?after={after}" if after else ""), None, RunPage)

    def run(self, run: str) -> RunView:
        """By id or slug."""
        return self._ask("GET", f"/runs/{quote(run, safe='')}", None, RunView)

    def join(
        self, run: str, addresses: list[Address], hardware: HardwareView | None = None
    ) -> JoinReply:
        request = JoinRequest(version=__version__, addresses=addresses, hardware=hardware)
        return self._ask("POST", f"/runs/{run}/join", request, JoinReply)

    def manifest(self, run: str, manifest: TextManifest) -> RunView:
        return self._ask(
            "POST", f"/runs/{run}/manifest", self.identity.sign("manifest", manifest), RunView
        )

    def report(
        self,
        run: str,
        reports: list[Report],
        heeds: Sequence[str] = (),
        witnessed: Sequence[Attestation] = (),
    ) -> ReportReply:
        sent = Reports(reports=reports, applied_verdicts=list(heeds), attestations=list(witnessed))
        return self._ask("POST", f"/runs/{run}/reports", sent, ReportReply)

    def listen(self, run: str) -> ReportReply:
        """What a report would be answered, without one."""
        return self._ask("GET", f"/runs/{run}/directive", None, ReportReply)

    def mirrors(self, after: int) -> MirrorLists:
        """The mirror lists past this version that lead to the newest."""
        return self._ask("GET", f"/mirrors/list?after={after}", None, MirrorLists)

    def close(self) -> None:
        self._http.close()

    def _ask(
        self, method: str, path: str, message: Message | None, shape: type[M], again: bool = True
    ) -> M:
        path, body = (
            "/api/v1" + path,
            b"" if message is None else message.model_dump_json().encode(),
        )
        headers = {
            "X-Request-ID": secrets.token_hex(16)
        }  # the site logs it, so that one can find the other's line
        headers |= {"Content-Type": "application/json"} if body else {}
        if self.mirror:
            token = self.identity.sign_request(self.mirror, method, path, body, self.now())
            headers["Authorization"] = f"Barnraise {token}"
        status, answer = self._exchange(method, path, body, headers)
        try:
            if status < 400:
                return shape.model_validate_json(answer)
            problem = Problem.model_validate_json(answer)
        except ValidationError:
            what = "with something that is not Barnraise's API"
            raise CoordinatorGone(f"{self.url} answered {status} {what}", status) from None
        if status == 401 and again and problem.time and self._learn_time(problem.time):
            return self._ask(method, path.removeprefix("/api/v1"), message, shape, again=False)
        details = "".join(f"\n  {field}: {sentence}" for field, sentence in problem.fields.items())
        if status >= 500:
            raise CoordinatorGone(
                f"{problem.error}{details} (request {headers['X-Request-ID']})", status
            )
        raise CoordinatorError(problem.error + details, status)

    def _exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Bounded in size and in seconds between bytes; whatever goes wrong on the way is CoordinatorGone."""
        answer = bytearray()
        try:
            with self._http.stream(
                method, self.url + path, content=body, headers=headers
            ) as response:
                for piece in response.iter_bytes():
                    answer += piece
                    if len(answer) > MAX_ANSWER:
                        raise CoordinatorGone(
                            f"{self.url} sent more than {MAX_ANSWER:,} bytes and was cut off"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CoordinatorGone(
                f"{self.url} does not answer ({error or type(error).__name__})"
            ) from None
        finally:
            self.bytes += len(body) + len(answer)
        return response.status_code, bytes(answer)

    def _learn_time(self, signed: Signed) -> bool:
        """Whether the mirror's own signed time changes what we would sign."""
        try:
            told = open_signed(signed, "time", ServerTime, self.mirror)
        except MessageError:
            return False
        before, self._ahead = self._ahead, told.time - self._clock()
        return abs(self._ahead - before) > 1.0
