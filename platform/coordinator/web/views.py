"""Every page but allauth's and the admin's."""

import uuid

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.db.models import F
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from barnraise import wire
from coordinator.accounts.models import Enrolment, Machine, Refused
from coordinator.live.picture import Picture
from coordinator.runs.models import Run
from coordinator.web.forms import RunForm

LISTED = 200  # runs on one page
CONTROLS = {
    "launch": "Launched. Training starts once a machine of yours has prepared the text.",
    "pause": "Paused. Machines keep their state and wait.",
    "resume": "Training goes on.",
    "cancel": "The run is cancelled.",
}
ORGANISERS = "Only organisers create runs here: ask the staff to make you one."
UNFINISHED = [s.value for s in wire.Status if s not in (wire.Status.FINISHED, wire.Status.CANCELLED)]


@require_safe
def home(request: HttpRequest) -> HttpResponse:
    visible = Run.objects.visible_to(request.user).filter(status__in=UNFINISHED).select_related("owner")
    return render(request, "home.html", {"runs": visible[:6], "site": site(request)})


@require_safe
def run_list(request: HttpRequest) -> HttpResponse:
    found = Run.objects.visible_to(request.user).select_related("owner")[:LISTED]
    under_way = [run for run in found if not run.is_over]
    over = [run for run in found if run.is_over]
    part = request.headers.get("HX-Request") == "true"
    return render(request, "parts/run_list.html" if part else "runs.html", {"under_way": under_way, "over": over})


@login_required
def run_new(request: HttpRequest) -> HttpResponse:
    if not request.user.may_create_runs:
        raise PermissionDenied(ORGANISERS)
    form = RunForm(request.POST or None)
    if request.method == "POST" and form.is_valid() and (run := form.save(request.user)):
        messages.success(request, "Here is your draft. Look it over, then launch it.")
        return redirect(run)
    return render(request, "run_form.html", {"form": form}, status=422 if form.is_bound else 200)


@login_required
def run_edit(request: HttpRequest, slug: str) -> HttpResponse:
    run = controlled(request, slug)
    if not run.allows("edit"):
        messages.error(request, "A launched run's rules never change.")
        return redirect(run)
    form = RunForm(request.POST or None, run=run)
    if request.method == "POST" and form.is_valid() and form.save(request.user):
        messages.success(request, "Saved.")
        return redirect(run)
    return render(request, "run_form.html", {"form": form, "run": run}, status=422 if form.is_bound else 200)


@login_required
@require_POST
def run_estimate(request: HttpRequest) -> HttpResponse:
    """What the form as typed so far comes to; an htmx fragment."""
    form = RunForm(request.POST)
    spec = form.cleaned_data.get("spec") if form.is_valid() or "spec" in form.cleaned_data else None
    found = {}
    if spec:
        size = spec.model.parameters
        found = {
            "parameters": size,
            "memory": size * (12 + 12 + 4),  # to train, to exchange, and the gradient: bytes a parameter
            "update": size,  # dense8: a byte a parameter
            "round": spec.recipe.step_sequences * spec.model.context * spec.recipe.round_steps,
            "tokens_each": spec.recipe.token_budget / size,
        }
    return render(request, "parts/estimate.html", {"estimate": found, "problems": len(form.errors)})


@require_safe
def run_page(request: HttpRequest, slug: str) -> HttpResponse:
    run = visible(request, slug)
    picture = Picture.take(run)
    share = picture.run["tokens"] / max(1, picture.run["budget"])
    return render(
        request,
        "run.html",
        {
            "run": run,
            "spec": run.spec,
            "now": picture,
            "share": min(1.0, share),
            "workers": sorted(picture.workers.values(), key=lambda w: (w["person"], w["name"], w["id"])),
            "mine": run.may_control(request.user),
            "site": site(request),
            "has_machine": request.user.is_authenticated and request.user.machines.filter(revoked=None).exists(),
        },
    )


@login_required
@require_POST
def run_control(request: HttpRequest, slug: str, action: str) -> HttpResponse:
    run = controlled(request, slug)
    if action not in CONTROLS:
        raise Http404
    if getattr(run, action)(actor=request.user):
        messages.success(request, CONTROLS[action])
    else:
        messages.error(request, f"The run is {run.status} now, so it cannot {action}.")
    return redirect(run)


@login_required
@require_safe
def machine_list(request: HttpRequest) -> HttpResponse:
    machines = request.user.machines.prefetch_related("memberships__run").order_by(
        F("revoked").asc(nulls_first=True), "-enrolled"
    )
    return render(request, "machines.html", {"machines": machines, "site": site(request)})


@login_required
@require_POST
def machine_revoke(request: HttpRequest, machine: uuid.UUID) -> HttpResponse:
    found = get_object_or_404(Machine, pk=machine, owner=request.user)
    if found.revoke(actor=request.user):
        messages.success(request, f"{found.name} is revoked: this site refuses it, and its peers hear of that.")
    return redirect("machines")


@login_required
@require_safe
def enrol_code(request: HttpRequest) -> HttpResponse:
    """For a code that is typed rather than followed."""
    typed = request.GET.get("code", "").strip()
    if typed and (found := Enrolment.find(typed)):
        return redirect("enrol", code=found.code)
    return render(request, "enrol_code.html", {"typed": typed}, status=404 if typed else 200)


@login_required
def enrol(request: HttpRequest, code: str) -> HttpResponse:
    found = Enrolment.find(code)
    if found is None or found.decided_by_id not in (None, request.user.pk):  # decided by somebody else: not theirs
        return render(request, "enrol_code.html", {"typed": code}, status=404)
    refusal = ""
    if request.method == "POST":
        try:
            if request.POST.get("answer") == "approve":
                found.approve(request.user)
            else:
                found.refuse(request.user)
        except Refused as error:
            refusal = f"{str(error)[:1].upper()}{str(error)[1:]}."
    about = wire.Machine.model_validate(found.about)
    context = {"enrolment": found, "about": about, "refusal": refusal, "runs": []}
    if found.status == "approved" and not refusal:
        context["runs"] = Run.objects.visible_to(request.user).filter(status__in=UNFINISHED)[:3]
    return render(request, "enrol.html", context, status=409 if refusal else 200)


def visible(request: HttpRequest, slug: str) -> Run:
    """A draft that is not theirs does not exist for a visitor."""
    run = Run.objects.select_related("owner").named(slug)
    if run is None or not run.may_see(request.user):
        raise Http404
    return run


def controlled(request: HttpRequest, slug: str) -> Run:
    run = visible(request, slug)
    if not run.may_control(request.user):
        raise PermissionDenied("Only the run's owner can do this.")
    return run


def site(request: HttpRequest) -> str:
    """The address that `barnraise login` takes."""
    return f"{request.scheme}://{request.get_host()}"
