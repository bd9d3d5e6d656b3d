"""Call a coordinator's API from a worker: one signed request and one checked answer a method."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from pydantic import BaseModel, RootModel

from barnraise import __version__
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError
from barnraise.protocol.checkups import Checkup
from barnraise.protocol.coordinator_messages import (
    Attestation,
    EnrolmentReply,
    EnrolmentRequest,
    EnrolmentStatus,
    InvitationToken,
    JoinReply,
    JoinRequest,
    MachineDescription,
    MirrorView,
    Problem,
    ReportReply,
    Reports,
    RunPage,
    RunSummary,
    RunView,
    TextManifest,
    WorkerRelease,
)
from barnraise.protocol.messages import Signed
from barnraise.protocol.mirror_list import MirrorLists
from barnraise.protocol.reports import Report
from barnraise.protocol.signed_http import (
    Answer,
    HttpOptions,
    ProblemError,
    RequestFailedError,
    SignedHttpClient,
)
from barnraise.protocol.signing import Identity, open_signed
from barnraise.protocol.versions import describe_other_versions, find_common_version
from barnraise.state_dir import StateDir

TIMEOUT_SECONDS = 15.0  # an answer that takes longer counts as none
SESSION = secrets.token_hex(8)  # of this process: a copied key on two machines shows by it
MAX_ANSWER_BYTES = 1 << 20  # no message of the API comes near it


class Json(RootModel[Any]):
    """Any JSON value."""


class CoordinatorClient(SignedHttpClient):
    """One coordinator, as this machine sees it.

    `mirror` is the key that was pinned at login: requests are addressed to it, so that one
    coordinator cannot pass them on to another. All methods that send a request raise
    CoordinatorError with the site's sentence, or CoordinatorUnreachableError.
    """

    def __init__(
        self,
        url: str,
        identity: Identity,
        mirror: str = "",
        clock: Callable[[], float] = time.time,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        options = HttpOptions(
            user_agent=f"barnraise/{__version__}",
            timeout_seconds=timeout_seconds,
            max_bytes=MAX_ANSWER_BYTES,
            clock=clock,
        )
        super().__init__(url, identity, mirror, options=options)

    @staticmethod
    def from_state_dir(state_dir: StateDir) -> "CoordinatorClient":
        """Return the client of the coordinator where this machine is enrolled."""
        membership = state_dir.membership
        return CoordinatorClient(membership.url, state_dir.identity, membership.mirror.key)

    @property
    def mirror(self) -> str:
        """Return the coordinator's key; empty until it is pinned."""
        return self.key

    def pin_mirror(self) -> MirrorView:
        """Ask who answers at this URL, and trust that key from now on."""
        started = time.monotonic()
        view = self.request("GET", "/mirror", None, MirrorView)
        if find_common_version(view.protocols) is None:
            raise CoordinatorError(f"{self.url}: {describe_other_versions(view.protocols)}")
        self.key = view.key
        self.set_server_time(view.time, time.monotonic() - started)
        return view

    def request_enrolment(self, machine: MachineDescription) -> EnrolmentReply:
        """Ask for a code by which a person can approve this machine."""
        request = EnrolmentRequest(
            mirror=self.mirror, key=self.identity.key, machine=machine, issued=self.now()
        )
        signed = self.identity.sign("enrolment", request)
        return self.request("POST", "/enrolments", signed, EnrolmentReply)

    def fetch_enrolment(self, code: str) -> EnrolmentStatus:
        """Fetch whether the code was approved."""
        return self.request("GET", f"/enrolments/{quote(code, safe='')}", None, EnrolmentStatus)

    def fetch_release(self) -> WorkerRelease:
        """Fetch which worker the site offers, as its pinned key signed it.

        Raises:
            MessageError: another key signed it.
        """
        signed = self.request("GET", "/worker", None, Signed)
        return open_signed(signed, "worker_release", WorkerRelease, self.mirror)

    def fetch_runs(self, after: str | None = None) -> RunPage:
        """Fetch one page of the runs this machine may see."""
        return self.request("GET", "/runs" + (f"?after={after}" if after else ""), None, RunPage)

    def fetch_run(self, run: str) -> RunView:
        """Fetch a run by its id or slug."""
        return self.request("GET", f"/runs/{quote(run, safe='')}", None, RunView)

    def accept_invitation(self, token: str) -> RunSummary:
        """Accept an invitation for this machine's owner; return the run that it is to."""
        return self.request("POST", "/invitations/accept", InvitationToken(token=token), RunSummary)

    def submit_checkup(self, checkup: Checkup) -> Checkup:
        """Submit what `barnraise doctor` found on this machine, for the machine's page."""
        return self.request("POST", "/machine/checkup", checkup, Checkup)

    def join_run(self, run: str, request: JoinRequest) -> JoinReply:
        """Join a run, or renew this machine's place and addresses in it."""
        return self.request("POST", f"/runs/{run}/join", request, JoinReply)

    def submit_manifest(self, run: str, manifest: TextManifest) -> RunView:
        """Sign and submit the manifest of a run's text."""
        signed = self.identity.sign("manifest", manifest)
        return self.request("POST", f"/runs/{run}/manifest", signed, RunView)

    def discard_manifest(self, run: str) -> RunView:
        """Discard the prepared text of a draft."""
        return self.request("DELETE", f"/runs/{run}/manifest", None, RunView)

    def send_reports(
        self,
        run: str,
        reports: list[Report],
        verdicts_after: int = 0,
        attestations: Sequence[Attestation] = (),
    ) -> ReportReply:
        """Send reports, the number of the last verdict that is applied here, and attestations."""
        sent = Reports(
            reports=reports,
            verdicts_after=verdicts_after,
            session=SESSION,
            attestations=list(attestations),
        )
        return self.request("POST", f"/runs/{run}/reports", sent, ReportReply)

    def fetch_directive(self, run: str) -> ReportReply:
        """Fetch what a report would be answered, without sending one."""
        return self.request("GET", f"/runs/{run}/directive", None, ReportReply)

    def fetch_mirror_lists(self, after: int) -> MirrorLists:
        """Fetch the mirror lists past this version that lead to the newest."""
        return self.request("GET", f"/mirrors/list?after={after}", None, MirrorLists)

    def request_json(self, method: str, *path: str, body: Any = None, **query: Any) -> Any:
        """Send one request and return the answer's JSON. Each part of the path is quoted."""
        address = "/" + "/".join(quote(part, safe="") for part in path)
        if query:
            address += f"?{urlencode(query)}"
        return self.request(method, address, None if body is None else Json(body), Json).root

    def request(
        self, method: str, path: str, message: BaseModel | None, shape: type[Answer]
    ) -> Answer:
        """Send one signed request below `/api/v1` and return its checked answer."""
        try:
            return super().request(method, path, message, shape)
        except RequestFailedError as error:
            raise CoordinatorUnreachableError(str(error), error.status) from None
        except ProblemError as error:
            sentence = describe_problem(error.problem)
            if error.status >= 500:
                raise CoordinatorUnreachableError(
                    f"{sentence} (request {error.request_id})", error.status
                ) from None
            raise CoordinatorError(sentence, error.status) from None


def describe_problem(problem: Problem) -> str:
    """Write a refusal with one line for each field that it names and does not explain itself."""
    fields = "".join(
        f"\n  {field}: {sentence}"
        for field, sentence in problem.fields.items()
        if sentence not in problem.error
    )
    return problem.error + fields
