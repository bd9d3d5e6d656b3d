"""A person's machines: list, page, rename, pause, resume, revoke, enrol."""

import uuid

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db.models import F, Prefetch, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from barnraise.protocol import coordinator_messages
from coordinator.accounts.models import Enrolment, Machine, UserError
from coordinator.fleet.machine_state import MachinePause, measured_hardware
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.web.run_views import UNFINISHED, site_url

MAX_NAME = 60  # characters


def list_own_machines(request: HttpRequest) -> QuerySet[Machine]:
    """Query the person's machines with everything their pages show, revoked ones last."""
    member = Membership.everywhere.newest().select_related("run").order_by("-last_seen")
    found = request.user.machines.select_related("pause", "measured").prefetch_related(
        Prefetch("memberships", member)
    )
    return found.order_by(F("revoked").asc(nulls_first=True), "-enrolled")


@login_required
@require_safe
def list_machines(request: HttpRequest) -> HttpResponse:
    """List the person's machines."""
    return render(
        request,
        "machines.html",
        {"machines": list_own_machines(request), "site": site_url(request)},
    )


@login_required
def show_machine(request: HttpRequest, machine: uuid.UUID) -> HttpResponse:
    """Show one machine; a POST renames it."""
    found, problem, typed = get_object_or_404(list_own_machines(request), pk=machine), "", None
    if request.method == "POST":
        typed = request.POST.get("name", "")
        length = len(" ".join(typed.split()))
        if length > MAX_NAME:
            problem = f"A name has at most {MAX_NAME} characters; this has {length}."
        else:
            found.rename(typed, actor=request.user)
            messages.success(request, f"Renamed to {found.name}.")
            return redirect("machine", machine=found.pk)
    context = {
        "machine": found,
        "hardware": measured_hardware(found),
        "memberships": found.memberships.all(),
        "typed": found.hostname if typed is None else typed,
        "problem": problem,
    }
    return render(request, "machine.html", context, status=422 if problem else 200)


@login_required
@require_POST
def control_machine(request: HttpRequest, machine: uuid.UUID, action: str) -> HttpResponse:
    """Pause, resume or revoke a machine."""
    found = get_object_or_404(Machine, pk=machine, owner=request.user)
    done, said = {
        "pause": (
            lambda: MachinePause.start(found, actor=request.user),
            "pauses with its next report and keeps its state.",
        ),
        "resume": (
            lambda: MachinePause.end(found, actor=request.user),
            "resumes with its next report.",
        ),
        "revoke": (
            lambda: found.revoke(actor=request.user),
            "is revoked: this site and its peers refuse it.",
        ),
    }[action]
    if done():
        messages.success(request, f"{found.name} {said}")
    else:
        state = "revoked" if found.revoked else "paused" if action == "pause" else "not paused"
        messages.error(request, f"{found.name} is {state} already.")
    return redirect("machines") if action == "revoke" else redirect("machine", machine=machine)


@login_required
@require_safe
def find_enrolment(request: HttpRequest) -> HttpResponse:
    """Find an enrolment by a code that is typed instead of its link."""
    typed = request.GET.get("code", "").strip()
    if typed and (found := Enrolment.find(typed)):
        return redirect("enrol", code=found.code)
    return render(request, "enrol_code.html", {"typed": typed}, status=404 if typed else 200)


@login_required
def decide_enrolment(request: HttpRequest, code: str) -> HttpResponse:
    """Show an enrolment; a POST approves or refuses it."""
    found = Enrolment.find(code)
    if found is None or found.decided_by_id not in (
        None,
        request.user.pk,
    ):  # decided by somebody else: not theirs
        return render(request, "enrol_code.html", {"typed": code}, status=404)
    refusal = ""
    if request.method == "POST":
        try:
            if request.POST.get("answer") == "approve":
                found.approve(request.user)
            else:
                found.refuse(request.user)
        except UserError as error:
            refusal = f"{str(error)[:1].upper()}{str(error)[1:]}."
    about = coordinator_messages.MachineDescription.model_validate(found.about)
    context = {"enrolment": found, "about": about, "refusal": refusal, "runs": []}
    if found.status == "approved" and not refusal:
        context["runs"] = Run.objects.visible_to(request.user).filter(status__in=UNFINISHED)[:3]
    return render(request, "enrol.html", context, status=409 if refusal else 200)
