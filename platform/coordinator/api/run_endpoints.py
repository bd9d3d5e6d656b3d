"""Endpoints for scripts, and for workers that list runs: runs and everything that belongs to them.

Each calls the same method of the model as the page of the same name.
"""

import json
from typing import Literal
from uuid import UUID

from django.http import HttpRequest

from barnraise.errors import SpecError
from barnraise.protocol import coordinator_messages, enums, types
from coordinator.accounts.models import User
from coordinator.api import schemas
from coordinator.api.authentication import ApiError, machine_or_token_auth, token_auth
from coordinator.api.errors import EndpointRouter
from coordinator.api.lookups import (
    get_credential,
    get_owned_run,
    get_visible_run,
    listed_runs,
    paginate,
    requesting_user,
)
from coordinator.fleet.models import Membership, VerdictRecord
from coordinator.fleet.run_authors import resolve_author
from coordinator.fleet.verdict_requests import ExclusionRequest, RetractionRequest
from coordinator.runs.drafts import NewRun
from coordinator.runs.estimate import MachineEstimate, estimate
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.join_policy import OPEN_TO_ALL, JoinPolicy
from coordinator.runs.models import Run
from coordinator.runs.reference_machines import REFERENCE_MACHINES
from coordinator.runs.spec_form import OFFERED, spec_from_fields
from coordinator.telemetry import checkpoints
from coordinator.telemetry.history import load_history
from coordinator.telemetry.run_cards import load_losses
from coordinator.telemetry.site_capacity import bearable_machines, count_web_processes

RUNS_PAGE = 5  # a run's view with its spec may be long
MAX_INVITATIONS = 200  # in one response
MAX_VERDICTS = 500  # in one response
READ = token_auth("runs:read")
READ_BY_MACHINE = machine_or_token_auth("runs:read")
WRITE = token_auth("runs:write")
Action = Literal["launch", "pause", "resume", "finish", "cancel", "archive", "unarchive"]

router = EndpointRouter(tags=["Runs"])


@router.get("/me", auth=token_auth(""), tags=["Account"])
def get_me(request: HttpRequest) -> schemas.Me:
    """Get the owner and the scopes of your token."""
    token = get_credential(request)
    return schemas.Me(
        id=token.user.pk,
        name=token.user.shown_name,
        token=token.name,
        scopes=token.scopes,
        expires=token.expires,
    )


@router.get("/runs", auth=READ_BY_MACHINE)
def list_runs(request: HttpRequest, after: types.Id | None = None) -> coordinator_messages.RunPage:
    """List the active runs that you or the machine can see, the newest first, five per page."""
    runs = listed_runs(request).exclude(status__in=["finished", "cancelled"])
    if after:
        runs = runs.filter(pk__lt=after)
    page, following = paginate(runs.order_by("-pk"), lambda run: run.pk, RUNS_PAGE)
    return coordinator_messages.RunPage(
        runs=[run.to_message() for run in page], next=str(following) if following else None
    )


@router.get("/runs/{name}", auth=READ_BY_MACHINE)
def get_run(request: HttpRequest, name: str) -> coordinator_messages.RunView:
    """Get a run by its id or slug."""
    return get_visible_run(request, name).to_message()


@router.post("/runs", auth=WRITE)
def create_run(request: HttpRequest, asked: schemas.RunIn) -> schemas.RunOut:
    """Create a draft, and launch it if `launch` is true."""
    require_organiser(request)
    spec = spec_from_fields({**OFFERED, **asked.fields}, asked.preset)
    new = NewRun(
        asked.name,
        spec,
        report_every=asked.report_every,
        quorum=asked.quorum,
        join_policy=merge_terms(OPEN_TO_ALL, asked.terms),
    )
    run = Run.create(requesting_user(request), new)
    if asked.launch:
        run.launch(actor=requesting_user(request))
    return run_out(request, run)


@router.get("/runs/{name}/summary", auth=READ_BY_MACHINE)
def get_run_summary(request: HttpRequest, name: str) -> schemas.RunOut:
    """Get a run with its configuration, its access and its progress."""
    return run_out(request, get_visible_run(request, name))


@router.post("/runs/{name}/actions/{action}", auth=WRITE)
def control_run(request: HttpRequest, name: str, action: Action) -> schemas.RunOut:
    """Launch, pause, resume, finish, cancel, archive or unarchive a run.

    `finish` ends it before its budget is spent; its machines save and share the model.
    """
    run = get_owned_run(request, name)
    if not getattr(run, action)(actor=requesting_user(request)):
        raise ApiError(409, f"the run {run.name} is {run.status} now, so it cannot {action}")
    return run_out(request, run)


@router.post("/runs/{name}/copies", auth=WRITE)
def copy_run(request: HttpRequest, name: str, asked: schemas.CloneIn) -> schemas.RunOut:
    """Create a draft with the configuration of a run that you can see.

    With `checkpoint`, it starts from the weights of that checkpoint.
    """
    run = get_visible_run(request, name)
    require_organiser(request)
    start = None
    if asked.checkpoint:
        checkpoint = run.checkpoints.filter(digest=asked.checkpoint).first()
        if checkpoint is None:
            raise ApiError(404, f"the run {run.name} has no checkpoint {asked.checkpoint[:16]}…")
        start = checkpoint.to_start()
    return run_out(request, run.clone(requesting_user(request), asked.name, start))


@router.patch("/runs/{name}/terms", auth=WRITE)
def change_terms(request: HttpRequest, name: str, asked: schemas.TermsIn) -> schemas.RunOut:
    """Change who can join, the minimum hardware and the notes, at any time."""
    run = get_owned_run(request, name)
    run.update_join_policy(merge_terms(run.join_policy, asked), actor=requesting_user(request))
    return run_out(request, run)


@router.get("/runs/{name}/machines", auth=READ_BY_MACHINE)
def list_run_machines(
    request: HttpRequest, name: str, after: UUID | None = None
) -> schemas.MemberPage:
    """List the machines in a run, fifty per page."""
    memberships = (
        Membership.everywhere.newest()
        .filter(run=get_visible_run(request, name))
        .exclude(activity=enums.Activity.FETCHING, tokens=0)  # downloads the weights alone
        .select_related("run", "machine__owner")
        .order_by("-machine_id")
    )
    if after:
        memberships = memberships.filter(machine__lt=after)
    page, following = paginate(memberships, lambda membership: membership.machine_id)
    return schemas.MemberPage(items=[member_out(member) for member in page], next=following)


@router.get("/runs/{name}/history", auth=READ_BY_MACHINE)
def get_history(request: HttpRequest, name: str) -> schemas.HistoryOut:
    """Get the curves of a run's page, each thinned to at most 600 points."""
    return schemas.HistoryOut.model_validate(
        {"curves": load_history(get_visible_run(request, name))}
    )


@router.get("/runs/{name}/checkpoints", auth=READ)
def list_checkpoints(request: HttpRequest, name: str) -> list[schemas.CheckpointOut]:
    """List the newest twenty checkpoints, who holds them, and whether they are confirmed."""
    return [
        schemas.describe(
            schemas.CheckpointOut,
            line.checkpoint,
            machines=line.machines,
            machines_online=line.alive,
            people=line.people,
            confirmed=line.confirmed,
            disputed=line.disputed,
        )
        for line in checkpoints.list_checkpoint_rows(get_visible_run(request, name))
    ]


@router.get("/runs/{name}/credit", auth=READ)
def list_credit(request: HttpRequest, name: str, after: UUID | None = None) -> schemas.CreditPage:
    """List credited ranges of updates, fifty per page, with the two signatures of each."""
    run = get_visible_run(request, name)
    credits_ = run.credits.filter(lead=None).select_related("machine").order_by("-pk")
    if after:
        credits_ = credits_.filter(pk__lt=after)
    page, following = paginate(credits_, lambda credit: credit.pk)
    items = [
        schemas.describe(
            schemas.CreditOut,
            credit,
            run=credit.run_id,
            peer=credit.machine.key,
            head=credit.author_header,
            witness=credit.witness_signature,
        )
        for credit in page
    ]
    return schemas.CreditPage(items=items, next=following)


@router.get("/runs/{name}/verdicts", auth=READ)
def list_verdicts(request: HttpRequest, name: str) -> list[schemas.VerdictOut]:
    """List the verdicts that removed updates from a run, the newest first, at most 500."""
    rows = get_visible_run(request, name).verdicts.all()[:MAX_VERDICTS]
    return [schemas.describe(schemas.VerdictOut, verdict) for verdict in rows]


@router.post("/runs/{name}/verdicts", auth=WRITE)
def issue_verdict(request: HttpRequest, name: str, asked: schemas.VerdictIn) -> schemas.VerdictOut:
    """Remove a machine's updates from your run, or exclude or clear a volunteer."""
    run = get_owned_run(request, name)
    requests: list[RetractionRequest] = []
    if asked.author or not (asked.exclude or asked.clear):
        updates = {int(number): tokens for number, tokens in asked.updates.items()}
        author = resolve_author(run, asked.author)
        requests.append(RetractionRequest(author, asked.first, updates))
    verdict = VerdictRecord.issue(
        run,
        requests,
        asked.reason,
        exclude=[
            ExclusionRequest(person, remove_updates=not asked.keep_updates)
            for person in _find_volunteers(run, "exclude", asked.exclude)
        ],
        clear=_find_volunteers(run, "clear", asked.clear),
        actor=requesting_user(request),
    )
    return schemas.describe(schemas.VerdictOut, verdict)


def _find_volunteers(run: Run, field: str, machine: str) -> list[User]:
    """Return the owner of a machine of the run, by its name, id or key; nobody for ""."""
    if not machine:
        return []
    key = resolve_author(run, machine).partition(".")[0]
    member = run.memberships.select_related("machine__owner").filter(machine__key=key).first()
    if member is None:
        raise SpecError({field: "no machine of this run has this key"})
    return [member.machine.owner]


@router.post("/runs/{name}/verdicts/{pk}/sign", auth=WRITE)
def sign_verdict(request: HttpRequest, name: str, pk: UUID) -> schemas.VerdictOut:
    """Add this mirror's signature to a verdict that waits for it."""
    verdict = get_owned_run(request, name).verdicts.filter(pk=pk).first()
    if verdict is None:
        raise ApiError(404, "this run has no such verdict")
    verdict.countersign(actor=requesting_user(request))
    return schemas.describe(schemas.VerdictOut, verdict)


@router.get("/runs/{name}/invitations", auth=READ)
def list_invitations(request: HttpRequest, name: str) -> list[schemas.InvitationOut]:
    """List the invitation links of your run that are not revoked."""
    invitations = get_owned_run(request, name).invitations.filter(withdrawn=None)
    return [invitation_out(request, invitation) for invitation in invitations[:MAX_INVITATIONS]]


@router.post("/runs/{name}/invitations", auth=WRITE)
def create_invitation(
    request: HttpRequest, name: str, asked: schemas.InvitationIn
) -> schemas.InvitationOut:
    """Create an invitation link; people who accept it can join with their machines."""
    run = get_owned_run(request, name)
    invitation = RunInvitation.create(run, asked.note, actor=requesting_user(request))
    return invitation_out(request, invitation)


@router.delete("/runs/{name}/invitations/{invitation}", auth=WRITE)
def withdraw_invitation(request: HttpRequest, name: str, invitation: UUID) -> schemas.RunOut:
    """Revoke an invitation link; people who have accepted it stay."""
    run = get_owned_run(request, name)
    pending = run.invitations.filter(pk=invitation).first()
    if pending is None:
        raise ApiError(404, "this run has no such invitation")
    pending.withdraw(actor=requesting_user(request))
    return run_out(request, run)


@router.post("/estimates", auth=READ)
def estimate_run(request: HttpRequest, asked: schemas.EstimateIn) -> schemas.EstimateOut:
    """Estimate memory, speed and duration of a run on typical machines of so many volunteers."""
    spec = spec_from_fields({**OFFERED, **asked.fields}, asked.preset)
    estimates = estimate(spec, list(REFERENCE_MACHINES), asked.volunteers)
    needs = [estimate_out(need) for need in estimates]
    return schemas.EstimateOut(parameters=spec.model.parameters, needs=needs)


# ---- checks and conversions -------------------------------------------------------------------


def require_organiser(request: HttpRequest) -> None:
    """Check that the token's owner may create runs.

    Raises:
        ApiError: They may not.
    """
    if not requesting_user(request).may_create_runs:
        raise ApiError(403, "only organisers create runs here: ask the staff to make you one")


def merge_terms(terms: JoinPolicy, asked: schemas.TermsIn) -> JoinPolicy:
    """Return the terms with the values that were sent."""
    return JoinPolicy(**{**terms.__dict__, **asked.model_dump(exclude_none=True)})


def run_out(request: HttpRequest, run: Run) -> schemas.RunOut:
    """Describe a run with its spec, and with its address at the site that was asked."""
    losses = load_losses([run])[run.pk]
    return schemas.describe(
        schemas.RunOut,
        run,
        owner=run.owner.shown_name,
        parameters=run.spec.model.parameters,
        tokens=run.ledger_tokens,
        people=run.ledger_people,
        training_loss=losses.training,
        validation_loss=losses.validation,
        machines_per_host=bearable_machines(count_web_processes()),
        url=request.build_absolute_uri(run.get_absolute_url()),
        spec=json.loads(run.to_message().spec),
    )


def member_out(membership: Membership) -> schemas.MemberOut:
    """Describe a machine in a run."""
    machine, figures = membership.machine, membership.all_figures
    shown = {name: figures[name] for name in figures if name in schemas.MemberOut.model_fields}
    return schemas.describe(
        schemas.MemberOut,
        membership,
        id=machine.pk,
        key=machine.key,
        name=machine.name,
        person=machine.owner.shown_name,
        alive=machine.revoked is None and membership.is_alive,
        **shown,
    )


def invitation_out(request: HttpRequest, invitation: RunInvitation) -> schemas.InvitationOut:
    """Describe an invitation with its link."""
    return schemas.InvitationOut(
        id=invitation.pk,
        note=invitation.note,
        url=request.build_absolute_uri(
            f"{invitation.run.get_absolute_url()}invited/{invitation.token}/"
        ),
        expires=invitation.expires,
        guests=invitation.guests.count(),
    )


def estimate_out(need: MachineEstimate) -> schemas.NeedOut:
    """Describe what a run needs of one kind of machine."""
    plan = need.plan
    return schemas.NeedOut(
        machine=need.name,
        refusal=need.refusal,
        step_seconds=need.step_seconds,
        tokens_per_second=need.tokens_per_second,
        host_bytes=plan.host_bytes if plan else 0,
        device_bytes=plan.device_bytes if plan else 0,
        disk_bytes=plan.disk_bytes if plan else 0,
        limited_by=plan.bottleneck if plan else "",
        paces=[
            schemas.PaceOut(
                uplink_megabits=pace.line.up_megabits,
                downlink_megabits=pace.line.down_megabits,
                strategy=pace.choice.chosen.strategy,
                strategy_reason=pace.choice.reason,
                seconds=pace.seconds,
                steps_per_round=pace.schedule.steps,
                compression=str(pace.schedule.scheme),
                slowdown=pace.slowdown,
                rounds=pace.gain.rounds,
                speedup=pace.gain.speedup,
                speedup_basis=pace.gain.basis,
            )
            for pace in need.run_times
        ],
    )
