"""Endpoints for workers: enrolment, joining a run, the manifest, reports and directives."""

import time
from itertools import pairwise

from django.http import HttpRequest, HttpResponse

from barnraise.errors import MessageError
from barnraise.protocol import coordinator_messages, enums, messages
from barnraise.protocol.checkups import Checkup
from barnraise.protocol.evaluation import PublishedTexts, TaskScore
from barnraise.protocol.signing import check_attestation, open_signed
from coordinator.accounts.models import Enrolment
from coordinator.api.authentication import (
    ApiError,
    authenticate_machine,
    client_address,
    enforce_machine_limit,
    enforce_rate_limit,
    source_ip,
)
from coordinator.api.errors import EndpointRouter
from coordinator.api.lookups import get_visible_run, requesting_machine, require_membership
from coordinator.api.manifest_check import check_manifest
from coordinator.fleet.directives import (
    build_directive,
    peer_hints,
    renew_ticket,
    signing_right,
)
from coordinator.fleet.join import admit_machine, join_refusal, update_addresses
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.machine_state import MachineCheckup
from coordinator.fleet.models import VerdictRecord
from coordinator.fleet.run_broadcast import get_broadcast
from coordinator.fleet.worker_sessions import report_session
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.lib.trusted_proxies import CLIENT_HEADER
from coordinator.notify.detectors import draft_refusal
from coordinator.notify.models import Notification
from coordinator.ops.write_limits import REFUSAL, count_write
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.models import PublishedText, Run
from coordinator.telemetry import report_queue
from coordinator.telemetry.attendance import find_standing
from coordinator.telemetry.checkpoints import list_confirmed_anchors
from coordinator.telemetry.report_pace import report_pace
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.task_scores import record_score
from coordinator.web.worker_wheel import find_wheel, read_pins

MAX_CLOCK_DIFFERENCE = 600  # seconds between a machine's clock and ours when it enrols
ENROLMENT_POLL_SECONDS = 1.0
MAX_JOINS = 120  # of one machine, which joins when it starts or changes mirrors
JOINS_SECONDS = 600

router = EndpointRouter(tags=["Workers"])


@router.get("/mirror")
def get_mirror(request: HttpRequest, response: HttpResponse) -> coordinator_messages.MirrorView:
    """Get this coordinator's name, key and time."""
    if not client_address(request):
        response[CLIENT_HEADER] = "unknown"
    return site_identity.mirror_view()


@router.get("/worker")
def get_worker_release(request: HttpRequest) -> messages.Signed:
    """Get the version and the digest of the worker that this site offers, signed by the site."""
    wheel = find_wheel()
    if wheel is None:
        raise ApiError(404, "this site offers no worker to download")
    release = coordinator_messages.WorkerRelease(
        version=wheel.version,
        file=wheel.name,
        size=wheel.size,
        sha256=wheel.sha256,
        constraints=read_pins(),
    )
    return site_identity.identity().sign("worker_release", release)


@router.post("/enrolments")
def request_enrolment(
    request: HttpRequest, signed: messages.Signed
) -> coordinator_messages.EnrolmentReply:
    """Request a code for the key that signs this; a person approves it in the browser."""
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
    if abs(asked.issued - time.time()) > MAX_CLOCK_DIFFERENCE:
        raise ApiError(
            401, "the enrolment was signed at another time than now: use the time in this answer"
        )
    enrolment = Enrolment.open(asked)
    return coordinator_messages.EnrolmentReply(
        code=enrolment.code,
        expires=enrolment.expires_epoch,
        poll_every=ENROLMENT_POLL_SECONDS,
    )


@router.get("/enrolments/{code}")
def get_enrolment(request: HttpRequest, code: str) -> coordinator_messages.EnrolmentStatus:
    """Get the status of an enrolment."""
    enrolment = Enrolment.find(code)
    if enrolment is None:
        raise ApiError(404, "there is no such code; run `barnraise login` for a new one")
    machine = enrolment.machine
    return coordinator_messages.EnrolmentStatus.model_validate(
        {
            "status": enrolment.status,
            "machine": str(machine.pk) if machine else None,
            "person": machine.owner.shown_name if machine else "",
            "name": machine.name if machine else "",
        }
    )


@router.post("/invitations/accept", auth=authenticate_machine)
def accept_invitation(
    request: HttpRequest, asked: coordinator_messages.InvitationToken
) -> coordinator_messages.RunSummary:
    """Accept an invitation for the machine's owner, whose machines may join its run from then on.

    The person typed the invitation's address on the machine, as others open it in a browser.
    """
    invitation = RunInvitation.find_by_token(asked.token)
    if invitation is None:
        raise ApiError(
            404, "this invitation is wrong, revoked or expired: ask the run's owner for a new link"
        )
    if not invitation.accept(requesting_machine(request).owner):
        raise ApiError(409, "this invitation was used too many times: ask for a new link")
    run = invitation.run
    return coordinator_messages.RunSummary(
        id=str(run.pk),
        slug=run.slug,
        name=run.name,
        status=run.state,
        launching=run.is_launching,
    )


@router.post("/machine/checkup", auth=authenticate_machine)
def record_checkup(request: HttpRequest, checkup: Checkup) -> Checkup:
    """Send what `barnraise doctor` found on the machine, for its owner's page of it."""
    MachineCheckup.record(requesting_machine(request), checkup)
    return checkup


@router.post("/runs/{name}/join", auth=authenticate_machine)
def join_run(
    request: HttpRequest, name: str, asked: coordinator_messages.JoinRequest
) -> coordinator_messages.JoinReply:
    """Join a run: get a ticket (none while the run is a draft) and the addresses of some peers."""
    run = get_visible_run(request, name)
    machine = requesting_machine(request)
    # It reads the run's checkpoints and signs a ticket, which peers may store for ever.
    enforce_machine_limit(machine, "join", MAX_JOINS, JOINS_SECONDS)
    if run.state is enums.RunStatus.CANCELLED:  # a finished run is joined to download its weights
        raise ApiError(409, f"the run {run.name} is {run.status}, so nobody can join it")
    if sentence := join_refusal(run, machine, asked.hardware, asked.purpose):
        Notification.create_once(draft_refusal(machine, run, sentence))
        raise ApiError(403, sentence)
    # Store queued reports first: an earlier "left" of this machine must not overwrite the join.
    drain_queue(wait=True)
    membership = admit_machine(run, machine, asked, client_address(request))
    get_broadcast(run, fresh=True)
    return coordinator_messages.JoinReply(
        run=membership.run.to_message(),  # consistent with the ticket, even if it was just launched
        ticket=renew_ticket(membership, always=True, find_standing=find_standing),
        directive=build_directive(membership, report_pace.choose_interval(run.report_every)),
        peers=peer_hints(membership),
        confirmed_anchors=list_confirmed_anchors(run),
        # A machine with a new folder continues its numbers after all reports that were received.
        acknowledged=max(
            membership.high_water_mark,
            membership.latest,
            report_queue.newest_report_number(run.pk, machine.pk),
        ),
        source_ip=source_ip(request),
        signing=signing_right(run, machine),
    )


@router.post("/runs/{name}/manifest", auth=authenticate_machine)
def post_manifest(
    request: HttpRequest, name: str, signed: messages.Signed
) -> coordinator_messages.RunView:
    """Send the manifest of a draft's text, prepared by one of its owner's machines.

    The launch pins it.
    """
    run = get_visible_run(request, name)
    machine = requesting_machine(request)
    require_signer(request, run)
    check_manifest(run, machine, signed)
    is_accepted = run.accept_manifest(signed, machine=machine)
    if not is_accepted and (run.manifest or {}).get("body") != signed.body:
        if run.manifest is None and run.state is enums.RunStatus.DRAFT:
            raise ApiError(409, f"the run {run.name} was edited meanwhile; prepare its text again")
        raise ApiError(409, f"the run {run.name} has its text already, which cannot be changed")
    advance_run(run)
    return run.to_message()


@router.delete("/runs/{name}/manifest", auth=authenticate_machine)
def discard_manifest(request: HttpRequest, name: str) -> coordinator_messages.RunView:
    """Discard the prepared text of a draft, so that one of its owner's machines prepares another.

    After the launch the text stays as it is: machines train on it.
    """
    run = get_visible_run(request, name)
    require_signer(request, run)
    if not run.discard_text(machine=requesting_machine(request)) and run.manifest is not None:
        raise ApiError(
            409,
            f"the run {run.name} is launched, so its text cannot be changed: copy the run instead",
        )
    return run.to_message()


def require_signer(request: HttpRequest, run: Run) -> None:
    """Check that a machine may sign for a run.

    Raises:
        ApiError: It is not the owner's, or the owner has not confirmed it.
    """
    machine = requesting_machine(request)
    right = signing_right(run, machine)
    if right is enums.SigningRight.REFUSED:
        raise ApiError(403, "only a machine of the run's owner may say what its text is")
    if not count_write(machine.owner_id):  # each text is an event that all mirrors keep
        raise ApiError(429, REFUSAL)
    if right is enums.SigningRight.UNCONFIRMED:
        page = request.build_absolute_uri(f"/machines/{machine.pk}/")
        raise ApiError(
            403,
            f"confirm at {page} that {machine.name} (key {machine.key[:16]}…) may sign for your "
            "runs, then try again",
        )


@router.get("/runs/{name}/published", auth=authenticate_machine)
def get_published(request: HttpRequest, name: str) -> PublishedTexts:
    """Get the texts that the run's owner publishes with it: tasks, and a preview of its text."""
    return PublishedText.find(get_visible_run(request, name))


@router.post("/runs/{name}/published", auth=authenticate_machine)
def publish_texts(request: HttpRequest, name: str, texts: PublishedTexts) -> PublishedTexts:
    """Publish tasks, or beginnings of the prepared text's documents, from the owner's machine."""
    run = get_visible_run(request, name)
    require_signer(request, run)
    if texts.preview and run.manifest is None:
        raise ApiError(409, f"a preview is of the prepared text, which {run.name} does not have")
    PublishedText.publish(run, texts, machine=requesting_machine(request))
    return PublishedText.find(run)


@router.post("/runs/{name}/scores", auth=authenticate_machine)
def post_score(request: HttpRequest, name: str, score: TaskScore) -> TaskScore:
    """Send how many of the run's tasks its weights answered."""
    run = get_visible_run(request, name)
    machine = requesting_machine(request)
    if not count_write(machine.owner_id):
        raise ApiError(429, REFUSAL)
    try:
        record_score(run, machine, score)
    except UserError as error:
        raise ApiError(409, str(error)) from None
    return score


@router.post("/runs/{name}/reports", auth=authenticate_machine)
def post_reports(
    request: HttpRequest, name: str, sent: coordinator_messages.Reports
) -> coordinator_messages.ReportReply:
    """Send reports and get a directive, which says in how many seconds the next one is due.

    All reports up to the number `acknowledged` are stored in the database.
    """
    membership = require_membership(request, name)
    if sent.session and report_session(membership.run_id, membership.machine_id, sent.session):
        raise ApiError(409, messages.COPIED_KEY)
    numbers = [report.seq for report in sent.reports]
    if any(number >= following for number, following in pairwise(numbers)):
        raise ApiError(
            422, "reports must come in the order of their numbers", {"reports": "seq must ascend"}
        )
    for attestation in sent.attestations:
        try:
            check_attestation(attestation, str(membership.run_id), requesting_machine(request).key)
        except MessageError as error:
            raise ApiError(422, str(error), {"attestations": str(error)}) from None
    interval = report_pace.choose_interval(membership.run.report_every)
    try:
        report_queue.queue_reports(membership, sent.reports, sent.attestations, interval)
    except report_queue.QueueFullError:
        raise ApiError(
            503, "the site is behind with its reports; keep yours and try again in a minute"
        ) from None
    update_addresses(membership, list(sent.reports[-1].addresses), client_address(request))
    verdicts, verdicts_until = [], 0
    if membership.has_verdicts:
        verdicts, verdicts_until = VerdictRecord.list_after(membership.run_id, sent.verdicts_after)
    return coordinator_messages.ReportReply(
        acknowledged=membership.high_water_mark,
        directive=build_directive(membership, interval),
        ticket=renew_ticket(membership, find_standing=find_standing),
        peers=peer_hints(membership),
        verdicts=verdicts,
        verdicts_until=verdicts_until,
        source_ip=source_ip(request),
    )


@router.get("/runs/{name}/directive", auth=authenticate_machine)
def get_directive(request: HttpRequest, name: str) -> coordinator_messages.ReportReply:
    """Get the directive without sending a report.

    Machines that report rarely use it, so that a revocation reaches them in time.
    """
    membership = require_membership(request, name)
    interval = report_pace.choose_interval(membership.run.report_every)
    return coordinator_messages.ReportReply(
        acknowledged=membership.high_water_mark, directive=build_directive(membership, interval)
    )
