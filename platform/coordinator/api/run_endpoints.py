"""What an organiser's scripts do with runs: the same methods as the pages', by a personal token."""

import json
from typing import Literal
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest

from coordinator.accounts.models import User
from coordinator.api import schemas
from coordinator.api.authentication import ApiError, token_auth
from coordinator.api.ninja_api import api, responses
from coordinator.api.worker_endpoints import get_visible_run
from coordinator.fleet.models import Membership, VerdictRecord
from coordinator.fleet.verdicts import RetractionRequest, resolve_author
from coordinator.runs.estimate import estimate
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.join_policy import OPEN_TO_ALL, JoinPolicy
from coordinator.runs.models import Run
from coordinator.runs.reference_machines import REFERENCE_MACHINES
from coordinator.runs.spec_form import OFFERED, spec_from_fields
from coordinator.telemetry import checkpoints

PAGE = 50
READ, WRITE = token_auth("runs:read"), token_auth("runs:write")
Action = Literal["launch", "pause", "resume", "cancel", "archive", "unarchive"]


@api.get("/me", response=responses(schemas.Me), auth=token_auth(""), tags=["Account"])
def get_me(request: HttpRequest):
    """Whose token this is, and what it may do."""
    token = request.auth
    return schemas.Me(
        id=token.user.pk,
        name=token.user.shown_name,
        token=token.name,
        scopes=token.scopes,
        expires=token.expires,
    )


@api.post("/runs", response=responses(schemas.RunOut), auth=WRITE, tags=["Runs"])
def create_run(request: HttpRequest, asked: schemas.RunIn):
    """A draft; launched at once, if asked."""
    require_organiser(request)
    spec = spec_from_fields({**OFFERED, **asked.fields}, asked.preset)
    run = Run.create(
        requesting_user(request),
        asked.name,
        spec,
        report_every=asked.report_every,
        quorum=asked.quorum,
        terms=merge_terms(OPEN_TO_ALL, asked.terms),
    )
    if asked.launch:
        run.launch(actor=requesting_user(request))
    return run_out(run)


@api.get("/runs/{name}/summary", response=responses(schemas.RunOut), auth=READ, tags=["Runs"])
def get_run_summary(request: HttpRequest, name: str):
    """A run with its rules, its terms and how far it is."""
    return run_out(get_visible_run(request, name))


@api.post(
    "/runs/{name}/actions/{action}", response=responses(schemas.RunOut), auth=WRITE, tags=["Runs"]
)
def control_run(request: HttpRequest, name: str, action: Action):
    """Launch, pause, resume, cancel, archive, or back from the archive."""
    run = get_owned_run(request, name)
    if not getattr(run, action)(actor=requesting_user(request)):
        raise ApiError(409, f"the run {run.name} is {run.status} now, so it cannot {action}")
    return run_out(run)


@api.post("/runs/{name}/copies", response=responses(schemas.RunOut), auth=WRITE, tags=["Runs"])
def copy_run(request: HttpRequest, name: str, asked: schemas.CloneIn):
    """A draft of yours with the rules of a run that you see; from a checkpoint of it, if you name one."""
    run = get_visible_run(request, name)
    require_organiser(request)
    start = None
    if asked.checkpoint:
        found = run.checkpoints.filter(digest=asked.checkpoint).first()
        if found is None:
            raise ApiError(404, f"the run {run.name} has no checkpoint {asked.checkpoint[:16]}…")
        start = found.to_start()
    return run_out(run.clone(requesting_user(request), asked.name, start))


@api.patch("/runs/{name}/terms", response=responses(schemas.RunOut), auth=WRITE, tags=["Runs"])
def change_terms(request: HttpRequest, name: str, asked: schemas.TermsIn):
    """Who may join, with what, and the notes: at any time."""
    run = get_owned_run(request, name)
    run.update_join_policy(merge_terms(run.join_policy, asked), actor=requesting_user(request))
    return run_out(run)


@api.get("/runs/{name}/machines", response=responses(schemas.MemberPage), auth=READ, tags=["Runs"])
def list_run_machines(request: HttpRequest, name: str, after: UUID | None = None):
    """The machines in a run, fifty a page."""
    run = get_visible_run(request, name)
    found = (
        Membership.everywhere.newest()
        .filter(run=run)
        .select_related("run", "machine__owner")
        .order_by("-machine_id")
    )
    page, following = paginate(
        found.filter(machine__lt=after) if after else found, lambda member: member.machine_id
    )
    items = [
        schemas.MemberOut(
            id=member.machine_id,
            name=member.machine.name,
            person=member.machine.owner.shown_name,
            alive=member.machine.revoked is None and member.is_alive,
            **{field: getattr(member, field) for field in MEMBER},
        )
        for member in page
    ]
    return schemas.MemberPage(items=items, next=following)


MEMBER = ("activity", "last_seen", "tokens", "rate", "step", "updates_sent", "updates_received")


@api.get(
    "/runs/{name}/checkpoints",
    response=responses(list[schemas.CheckpointOut]),
    auth=READ,
    tags=["Runs"],
)
def list_checkpoints(request: HttpRequest, name: str):
    """The newest twenty, by digest: who holds them, and which are confirmed."""
    return [
        schemas.CheckpointOut(
            **{field: getattr(line.checkpoint, field) for field in CHECKPOINT},
            machines=line.machines,
            machines_here=line.alive,
            people=line.people,
            confirmed=line.confirmed,
            disputed=bool(line.others),
        )
        for line in checkpoints.list_checkpoint_rows(get_visible_run(request, name))
    ]


CHECKPOINT = ("id", "tokens", "vector", "digest", "checksum", "size")


@api.get("/runs/{name}/credit", response=responses(schemas.CreditPage), auth=READ, tags=["Runs"])
def list_credit(request: HttpRequest, name: str, after: UUID | None = None):
    """Whose updates were witnessed in a run, fifty ranges a page, each with the two signatures that prove its end."""
    found = get_visible_run(request, name).credits.select_related("machine").order_by("-pk")
    page, following = paginate(found.filter(pk__lt=after) if after else found, lambda row: row.pk)
    items = [
        schemas.CreditOut(
            run=row.run_id,
            peer=row.machine.key,
            head=row.author_header,
            witness=row.witness_signature,
            **{field: getattr(row, field) for field in CREDIT},
        )
        for row in page
    ]
    return schemas.CreditPage(items=items, next=following)


CREDIT = ("id", "incarnation", "first", "last", "tokens", "day")


@api.get(
    "/runs/{name}/verdicts", response=responses(list[schemas.VerdictOut]), auth=READ, tags=["Runs"]
)
def list_verdicts(request: HttpRequest, name: str):
    """What was taken out of a run, by whose signature; the newest first. At most 500."""
    return [verdict_out(each) for each in get_visible_run(request, name).verdicts.all()]


@api.post(
    "/runs/{name}/verdicts", response=responses(schemas.VerdictOut), auth=WRITE, tags=["Runs"]
)
def issue_verdict(request: HttpRequest, name: str, asked: schemas.VerdictIn):
    """Takes a machine's updates out of a run of yours, on every machine, for good."""
    run = get_owned_run(request, name)
    updates = {int(number): tokens for number, tokens in asked.updates.items()}
    charge = RetractionRequest(resolve_author(run, asked.author), asked.first, updates)
    return verdict_out(
        VerdictRecord.issue(run, [charge], asked.reason, actor=requesting_user(request))
    )


@api.get(
    "/runs/{name}/invitations",
    response=responses(list[schemas.InvitationOut]),
    auth=READ,
    tags=["Runs"],
)
def list_invitations(request: HttpRequest, name: str):
    """The links that are still good, of a run of yours."""
    return [
        invitation_out(each)
        for each in get_owned_run(request, name).invitations.filter(withdrawn=None)[:200]
    ]


@api.post(
    "/runs/{name}/invitations", response=responses(schemas.InvitationOut), auth=WRITE, tags=["Runs"]
)
def create_invitation(request: HttpRequest, name: str, asked: schemas.InvitationIn):
    """A link: whoever follows it, signed in, may join with their machines."""
    return invitation_out(
        RunInvitation.create(
            get_owned_run(request, name), asked.note, actor=requesting_user(request)
        )
    )


@api.delete(
    "/runs/{name}/invitations/{invitation}",
    response=responses(schemas.RunOut),
    auth=WRITE,
    tags=["Runs"],
)
def withdraw_invitation(request: HttpRequest, name: str, invitation: UUID):
    """The link leads nowhere from now on; who came by it stays."""
    run = get_owned_run(request, name)
    found = run.invitations.filter(pk=invitation).first()
    if found is None:
        raise ApiError(404, "this run has no such invitation")
    found.withdraw(actor=requesting_user(request))
    return run_out(run)


@api.post("/estimates", response=responses(schemas.EstimateOut), auth=READ, tags=["Runs"])
def estimate_run(request: HttpRequest, asked: schemas.EstimateIn):
    """What a run would take on typical machines, and how long with so many volunteers who have such."""
    spec = spec_from_fields({**OFFERED, **asked.fields}, asked.preset)
    needs = [
        schemas.NeedOut(
            machine=need.name,
            refusal=need.refusal,
            step_seconds=need.step_seconds,
            tokens_a_second=need.tokens_per_second,
            host_bytes=need.plan.host_bytes if need.plan else 0,
            device_bytes=need.plan.device_bytes if need.plan else 0,
            disk_bytes=need.plan.disk_bytes if need.plan else 0,
            limited_by=need.plan.binding if need.plan else "",
            paces=[
                schemas.PaceOut(
                    line_megabits=pace.line,
                    seconds=pace.seconds,
                    steps_a_round=pace.schedule.steps,
                    update=str(pace.schedule.scheme),
                    waits=pace.slowdown,
                )
                for pace in need.run_times
            ],
        )
        for need in estimate(spec, list(REFERENCE_MACHINES), asked.volunteers)
    ]
    return schemas.EstimateOut(parameters=spec.model.parameters, needs=needs)


# ---- who asks, and what they get -----------------------------------------------------------------------------------


def requesting_user(request: HttpRequest) -> User:
    return request.auth.user  # type: ignore[attr-defined]


def require_organiser(request: HttpRequest) -> None:
    """Raises Refusal for who may not create runs."""
    if not requesting_user(request).may_create_runs:
        raise ApiError(403, "only organisers create runs here: ask the staff to make you one")


def get_owned_run(request: HttpRequest, name: str) -> Run:
    """Raises Refusal."""
    run = get_visible_run(request, name)
    if not run.may_control(requesting_user(request)):
        raise ApiError(403, "only the run's owner can do this")
    return run


def merge_terms(terms: JoinPolicy, asked: schemas.TermsIn) -> JoinPolicy:
    said = asked.model_dump(exclude_none=True)
    return JoinPolicy(**{**terms.__dict__, **said})


def paginate(found, cursor):
    """(the first PAGE of a queryset, the cursor of its last where there are more)."""
    page = list(found[: PAGE + 1])
    return page[:PAGE], cursor(page[PAGE - 1]) if len(page) > PAGE else None


def run_out(run: Run) -> schemas.RunOut:
    spec = run.to_message().spec
    return schemas.RunOut(
        **{field: getattr(run, field) for field in RUN},
        owner=run.owner.shown_name,
        parameters=run.spec.model.parameters,
        tokens=run.ledger_tokens,
        url=f"{settings.SITE_URL}{run.get_absolute_url()}",
        spec=json.loads(spec),
    )


RUN = (
    "id", "slug", "name", "status", "launch_requested", "token_budget", "access", "least_memory", "least_device_memory",
    "notes", "archived", "created", "launched", "started", "finished",
)  # fmt: skip


def verdict_out(verdict: VerdictRecord) -> schemas.VerdictOut:
    return schemas.VerdictOut(**{field: getattr(verdict, field) for field in VERDICT})


VERDICT = ("id", "digest", "body", "signatures", "given", "proven")


def invitation_out(invitation: RunInvitation) -> schemas.InvitationOut:
    return schemas.InvitationOut(
        id=invitation.pk,
        note=invitation.note,
        url=f"{settings.SITE_URL}{invitation.run.get_absolute_url()}invited/{invitation.token}/",
        expires=invitation.expires,
        guests=invitation.guests.count(),
    )
