"""Pages for the owner of a run: access, removed updates, budget, copies, invitations."""

import uuid

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from barnraise.errors import SpecError
from coordinator.accounts.models import User
from coordinator.accounts.requests import AuthenticatedRequest
from coordinator.fleet.marked_names import list_keys, mark_name
from coordinator.fleet.verdict_models import VerdictRecord
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoints import Checkpoint
from coordinator.telemetry.weights_before import find_weights_before
from coordinator.web.forms import ExtendForm, TermsForm
from coordinator.web.run_views import ORGANISERS, get_owned_run, get_visible_run, site_url
from coordinator.web.verdict_form import ExcludeForm, RunVerdictForm


@login_required
def edit_terms(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Edit who can join and the notes, in any status of the run."""
    run = get_owned_run(request, slug)
    form = TermsForm(request.POST or None, run=run)
    if request.method == "POST" and form.is_valid():
        form.save(request.user)
        messages.success(request, "Saved.")
        return redirect(run)
    return render(
        request, "run_terms.html", {"form": form, "run": run}, status=422 if form.is_bound else 200
    )


@login_required
def list_verdicts(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """List the removed updates; a POST removes more."""
    run = get_owned_run(request, slug)
    form = RunVerdictForm(request.POST or None, run=run)
    if request.method == "POST" and form.is_valid() and form.save(request.user):
        messages.success(
            request, "Signed. Machines receive it with their next reports and from each other."
        )
        return redirect("run_verdicts", slug=run.slug)
    context = {"form": form, "run": run, "verdicts": run.verdicts.select_related("by")[:100]}
    return render(request, "run_verdicts.html", context, status=422 if form.is_bound else 200)


@login_required
@require_POST
def sign_verdict(request: AuthenticatedRequest, slug: str, pk: uuid.UUID) -> HttpResponse:
    """Add this mirror's signature to a verdict of another mirror."""
    run = get_owned_run(request, slug)
    verdict = get_object_or_404(VerdictRecord, pk=pk, run=run)
    try:
        if verdict.countersign(actor=request.user):
            messages.success(request, "Signed here, too.")
    except SpecError as error:
        messages.error(request, f"This verdict cannot be signed here: {error}.")
    return redirect("run_verdicts", slug=run.slug)


@login_required
def exclude_volunteer(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Exclude a volunteer from a run, with all machines."""
    run = get_owned_run(request, slug)
    initial = {"person": request.GET.get("person"), "updates": "remove"}
    form = ExcludeForm(request.POST or None, run=run, initial=initial)
    if request.method == "POST" and form.is_valid() and form.save(request.user):
        person = form.cleaned_data["person"]
        name = mark_name(person, list_keys(run))
        messages.success(request, f"{name} is excluded. The machines of the run are informed.")
        if form.cleaned_data["afterwards"] == "begin-again":
            return restart_run(request, run, find_weights_before(run, person))
        return redirect("run_verdicts", slug=run.slug)
    context = {"form": form, "run": run}
    return render(request, "run_exclude.html", context, status=422 if form.is_bound else 200)


def restart_run(
    request: AuthenticatedRequest, run: Run, checkpoint: Checkpoint | None
) -> HttpResponse:
    """Pause a run, and create a draft that begins with its weights at a checkpoint.

    Without a checkpoint the draft begins as the run did.
    """
    if not request.user.may_create_runs:
        raise PermissionDenied(ORGANISERS)
    try:
        copy = run.clone(request.user, start=checkpoint.to_start() if checkpoint else None)
    except SpecError as error:
        messages.error(request, f"This run cannot be copied as it is: {error}.")
        return redirect(run)
    run.pause(actor=request.user)
    weights = "as the run did: it has no checkpoint from before they joined"
    if checkpoint:
        weights = f"with the weights at {checkpoint.tokens:,} tokens"
    messages.success(
        request, f"{run.name} is paused. This draft begins {weights}. Launch it to begin again."
    )
    return redirect("run_edit", slug=copy.slug)


@login_required
@require_POST
def clear_volunteer(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Let the updates of a suspended volunteer count again."""
    run = get_owned_run(request, slug)
    members = User.objects.filter(machines__memberships__run=run).distinct()
    try:
        person = get_object_or_404(members, pk=uuid.UUID(request.POST.get("person", "")))
        VerdictRecord.issue(run, [], clear=[person], actor=request.user)
        name = mark_name(person, list_keys(run))
        messages.success(request, f"{name} is cleared. The machines are informed.")
    except SpecError as error:
        messages.error(request, f"This volunteer cannot be cleared here: {error}.")
    except ValueError:
        raise Http404 from None
    return redirect(run)


@login_required
def extend_run(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Add tokens to the budget while some are left."""
    run = get_owned_run(request, slug)
    if run.is_over:
        messages.error(
            request,
            f"The run is {run.status}: its budget cannot grow. Train on from its weights instead.",
        )
        return redirect(f"{run.get_absolute_url()}#model")
    form = ExtendForm(request.POST or None, run=run)
    if request.method == "POST" and form.is_valid() and form.save(request.user):
        messages.success(
            request,
            f"{form.cleaned_data['tokens']:,} tokens added; machines receive this within seconds.",
        )
        return redirect(run)
    return render(
        request, "run_extend.html", {"form": form, "run": run}, status=422 if form.is_bound else 200
    )


@login_required
@require_POST
def clone_run(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Copy a visible run as a draft, optionally with the weights of a `checkpoint`."""
    run = get_visible_run(request, slug)
    if not request.user.may_create_runs:
        raise PermissionDenied(ORGANISERS)
    checkpoint = request.POST.get("checkpoint")
    start = get_checkpoint(run, checkpoint).to_start() if checkpoint else None
    try:
        copy = run.clone(request.user, start=start)
    except SpecError as error:
        messages.error(request, f"This run cannot be copied as it is: {error}.")
        return redirect(run)
    messages.success(
        request, f"A draft with the configuration of {run.name}: edit it, then launch it."
    )
    return redirect("run_edit", slug=copy.slug)


def get_checkpoint(run: Run, pk: str) -> Checkpoint:
    """Return a checkpoint of the run, or raise Http404."""
    try:
        return get_object_or_404(Checkpoint, pk=uuid.UUID(pk), run=run)
    except ValueError:
        raise Http404 from None


@login_required
@require_POST
def create_invitation(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Create an invitation link."""
    run = get_owned_run(request, slug)
    RunInvitation.create(run, request.POST.get("note", "").strip(), actor=request.user)
    messages.success(request, "Link created. People who accept it can join with their machines.")
    return redirect(f"{run.get_absolute_url()}#invitations")


@login_required
@require_POST
def withdraw_invitation(request: AuthenticatedRequest, slug: str, pk: uuid.UUID) -> HttpResponse:
    """Revoke an invitation link."""
    run = get_owned_run(request, slug)
    invitation = get_object_or_404(RunInvitation, pk=pk, run=run)
    if invitation.withdraw(actor=request.user):
        messages.success(request, "Link revoked. People who have accepted it stay.")
    return redirect(f"{run.get_absolute_url()}#invitations")


def accept_invitation(request: HttpRequest, slug: str, token: str) -> HttpResponse:
    """Show an invitation, to visitors as well; only its button accepts it.

    So following a link changes nothing, and everybody who has it sees who invites to what before
    they have an account.
    """
    invitation = RunInvitation.find_by_token(token)
    if invitation is None or invitation.run.slug != slug:
        raise Http404
    run = invitation.run
    if request.method == "POST" and not isinstance(request.user, User):
        return redirect_to_login(request.get_full_path())
    if request.method == "POST":
        if invitation.accept(request.user):
            messages.success(request, f"Your machines can join {run.name}.")
            return redirect(run if run.may_see(request.user) else "runs")
        messages.error(request, "This link was used too many times: ask the owner for another.")
    context = {"run": run, "invitation": invitation, "site": site_url(request)}
    return render(request, "run_invitation.html", context)
