"""The API's endpoints. Each reads, asks the right part of the site, and answers with a message from `wire`."""

import time
from itertools import pairwise

from django.http import HttpRequest

from barnraise.errors import MessageError
from barnraise.protocol import coordinator_messages, enums, messages, types
from barnraise.protocol.signing import check_attestation, open_signed
from coordinator.accounts.models import Enrolment, Machine
from coordinator.api.authentication import (
    ApiError,
    authenticate_machine,
    enforce_rate_limit,
    machine_or_token_auth,
)
from coordinator.api.manifest_check import check_manifest
from coordinator.api.ninja_api import api, responses
from coordinator.fleet.directives import build_directive, peer_hints, renew_ticket
from coordinator.fleet.join import admit_machine, join_refusal, update_addresses
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.models import Membership, VerdictRecord
from coordinator.fleet.report_queries import membership_for_run
from coordinator.fleet.run_broadcast import get_broadcast
from coordinator.lib import site_identity
from coordinator.notify.detectors import draft_refusal
from coordinator.notify.models import Notification
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue
from coordinator.telemetry.rollup import drain_queue
from coordinator.tokens.models import Token

PAGE = 5  # runs
ENROLMENT_SLACK = 600  # seconds a machine's clock may differ when it enrols
POLL_EVERY = 1.0


@api.get("/mirror", response=responses(coordinator_messages.MirrorView), tags=["Workers"])
def get_mirror(request: HttpRequest):
    """Who this coordinator is."""
    return site_identity.view()


@api.post("/enrolments", response=responses(coordinator_messages.Enrolment), tags=["Workers"])
def request_enrolment(request: HttpRequest, signed: messages.Signed):
    """A code for a machine's key, signed by that key; a person approves it in the browser."""
    enforce_rate_limit(request, "enrolments", 60, 600)
    try:
        asked = open_signed(signed, "enrolment", coordinator_messages.EnrolmentRequest)
    except MessageError as error:
        raise ApiError(422, str(error), {"signature": str(error)}) from None
    if asked.key != signed.key:
        raise ApiError(
            422,
            "a machine can only enrol the key it signs with",
            {"key": "must be the signing key"},
        )
    if asked.mirror != site_identity.identity().key:
        raise ApiError(
            422,
            "this enrolment is for another coordinator",
            {"mirror": "must be this coordinator's key"},
        )
    if abs(asked.issued - time.time()) > ENROLMENT_SLACK:
        raise ApiError(
            401, "the enrolment was signed at another time than now: use the time in this answer"
        )
    enrolment = Enrolment.open(asked)
    url = request.build_absolute_uri(f"/machines/enrol/{enrolment.code}/")
    return coordinator_messages.Enrolment(
        code=enrolment.code, url=url, expires=enrolment.expires_epoch, poll_every=POLL_EVERY
    )


@api.get(
    "/enrolments/{code}", response=responses(coordinator_messages.EnrolmentStatus), tags=["Workers"]
)
def get_enrolment(request: HttpRequest, code: str):
    """What became of a code."""
    enrolment = Enrolment.find(code)
    if enrolment is None:
        raise ApiError(404, "there is no such code; run `barnraise login` for a new one")
    machine = enrolment.machine
    return coordinator_messages.EnrolmentStatus(
        status=enrolment.status,
        machine=str(machine.pk) if machine else None,
        person=machine.owner.shown_name if machine else "",
    )


@api.get(
    "/runs",
    response=responses(coordinator_messages.RunPage),
    auth=machine_or_token_auth("runs:read"),
    tags=["Runs"],
)
def list_runs(request: HttpRequest, after: types.Id | None = None):
    """Runs this machine or person sees that are not over, newest first, five a page; `after` is the `next` of the page
    before."""
    found = visible_runs(request).listed().exclude(status__in=["finished", "cancelled"])
    if after:
        found = found.filter(pk__lt=after)
    page = list(found.order_by("-pk")[: PAGE + 1])
    following = str(page[PAGE - 1].pk) if len(page) > PAGE else None
    return coordinator_messages.RunPage(
        runs=[run.to_message() for run in page[:PAGE]], next=following
    )


@api.get(
    "/runs/{name}",
    response=responses(coordinator_messages.RunView),
    auth=machine_or_token_auth("runs:read"),
    tags=["Runs"],
)
def get_run(request: HttpRequest, name: str):
    """A run by id or slug."""
    return get_visible_run(request, name).to_message()


@api.post(
    "/runs/{name}/join",
    response=responses(coordinator_messages.JoinReply),
    auth=authenticate_machine,
    tags=["Workers"],
)
def join_run(request: HttpRequest, name: str, asked: coordinator_messages.JoinRequest):
    """A place in a run: a ticket for its peers (none while it is a draft), and whom to try first."""
    run = get_visible_run(request, name)
    if run.state is enums.RunStatus.CANCELLED:  # of a finished one the weights may be fetched
        raise ApiError(409, f"the run {run.name} is {run.status}; nobody can join it any more")
    if sentence := join_refusal(run, requesting_machine(request), asked.hardware):
        Notification.create_once(draft_refusal(requesting_machine(request), run, sentence))
        raise ApiError(403, sentence)
    drain_queue(
        wait=True
    )  # first: a goodbye that is still on its way must not come after the new arrival
    membership = admit_machine(run, requesting_machine(request), asked)
    get_broadcast(run, fresh=True)
    return coordinator_messages.JoinReply(
        run=membership.run.to_message(),  # as the ticket sees it: it may have been launched meanwhile
        ticket=renew_ticket(membership, always=True),
        directive=build_directive(membership),
        peers=peer_hints(membership),
        # A machine with a new folder numbers its reports past all that were heard, on their way or not.
        acknowledged=max(
            membership.mark,
            membership.latest,
            report_queue.newest_report_number(run.pk, requesting_machine(request).pk),
        ),
    )


@api.post(
    "/runs/{name}/manifest",
    response=responses(coordinator_messages.RunView),
    auth=authenticate_machine,
    tags=["Workers"],
)
def post_manifest(request: HttpRequest, name: str, signed: messages.Signed):
    """The text of a draft as its owner's machine has prepared it. The launch pins it."""
    run = get_visible_run(request, name)
    if requesting_machine(request).owner_id != run.owner_id:
        raise ApiError(403, "only a machine of the run's owner may say what its text is")
    check_manifest(run, requesting_machine(request), signed)
    if (
        not run.accept_manifest(signed, machine=requesting_machine(request))
        and (run.manifest or {}).get("body") != signed.body
    ):
        if run.manifest is None and run.state is enums.RunStatus.DRAFT:
            raise ApiError(409, f"the run {run.name} was edited meanwhile; prepare its text again")
        raise ApiError(
            409, f"the run {run.name} has its text already; it cannot be changed any more"
        )
    advance_run(run)
    return run.to_message()


@api.post(
    "/runs/{name}/reports",
    response=responses(coordinator_messages.ReportReply),
    auth=authenticate_machine,
    tags=["Workers"],
)
def post_reports(request: HttpRequest, name: str, sent: coordinator_messages.Reports):
    """Numbers in, a directive out. `mark`: everything up to this report is safe in the database."""
    membership = require_membership(request, name)
    numbers = [report.seq for report in sent.reports]
    if any(a >= b for a, b in pairwise(numbers)):
        raise ApiError(
            422, "reports must come in the order of their numbers", {"reports": "seq must ascend"}
        )
    for told in sent.attestations:
        try:
            check_attestation(told, str(membership.run_id), requesting_machine(request).key)
        except MessageError as error:
            raise ApiError(422, str(error), {"attestations": str(error)}) from None
    try:
        report_queue.queue_reports(membership, sent.reports, sent.attestations)
    except report_queue.QueueFullError:
        raise ApiError(
            503, "the site is behind with its reports; keep yours and try again in a minute"
        ) from None
    update_addresses(membership, list(sent.reports[-1].addresses))
    return coordinator_messages.ReportReply(
        acknowledged=membership.mark,
        directive=build_directive(membership),
        ticket=renew_ticket(membership),
        peers=peer_hints(membership),
        verdicts=VerdictRecord.unacknowledged_by(membership.run_id, sent.applied_verdicts)
        if membership.judged
        else [],
    )


@api.get(
    "/runs/{name}/directive",
    response=responses(coordinator_messages.ReportReply),
    auth=authenticate_machine,
    tags=["Workers"],
)
def get_directive(request: HttpRequest, name: str):
    """What a report would be answered, without one: a revocation must not wait where reports are rare."""
    membership = require_membership(request, name)
    return coordinator_messages.ReportReply(
        acknowledged=membership.mark, directive=build_directive(membership)
    )


def requesting_machine(request: HttpRequest) -> Machine:
    """Who signed the request."""
    return request.auth  # type: ignore[attr-defined]  # set by ninja from `signed_by_machine`


def require_membership(request: HttpRequest, name: str) -> Membership:
    """The machine's part in the run of this id or slug. Raises Refusal."""
    membership = membership_for_run(requesting_machine(request), name)
    if membership is None:
        run = get_visible_run(request, name)
        raise ApiError(403, f"this machine is not in the run {run.name}: join it first")
    return membership


def visible_runs(request: HttpRequest):
    """The runs that whoever asks may know of."""
    if isinstance(request.auth, Token):
        return Run.objects.visible_to(request.auth.user)
    return Run.objects.visible_to_machine(requesting_machine(request))


def get_visible_run(request: HttpRequest, name: str) -> Run:
    """One of them, by id or slug. Raises Refusal."""
    run = visible_runs(request).find(name)
    if run is None:
        who = "you" if isinstance(request.auth, Token) else "this machine"
        raise ApiError(404, f"there is no run '{name[:60]}' here that {who} may see")
    return run
