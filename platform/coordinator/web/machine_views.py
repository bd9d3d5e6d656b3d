"""A person's machines: list, page, rename, pause, resume, revoke, enrol."""

import re
import uuid
from datetime import UTC, datetime, timedelta
from datetime import timezone as dt_timezone

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db.models import F, Prefetch, QuerySet
from django.http import HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from barnraise import __version__
from barnraise.errors import StateError
from barnraise.planning.pause_times import find_pause_end
from barnraise.protocol import coordinator_messages, enums
from coordinator.accounts.models import Enrolment, Machine, UserError
from coordinator.accounts.requests import AuthenticatedRequest
from coordinator.fleet.machine_state import MachinePause, measured_hardware
from coordinator.fleet.marked_names import twin_names
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.telemetry import machine_history
from coordinator.web import machine_condition
from coordinator.web.run_views import UNFINISHED, site_url
from coordinator.web.templatetags.barnraise import ago, current_membership

MAX_NAME = 60  # characters


def machines_of_person(request: AuthenticatedRequest) -> QuerySet[Machine]:
    """Select the person's machines with everything their pages show, revoked ones last."""
    memberships = Membership.everywhere.newest().select_related("run").order_by("-last_seen")
    machines = request.user.machines.select_related(
        "pause", "measured", "checkup"
    ).prefetch_related(Prefetch("memberships", memberships))
    return machines.order_by(F("revoked").asc(nulls_first=True), "-enrolled")


@login_required
@require_safe
def list_machines(request: AuthenticatedRequest) -> HttpResponse:
    """List the person's machines."""
    machines = list(machines_of_person(request))
    context = {"machines": machines, "twins": twin_names(machines), "site": site_url(request)}
    if not machines:
        context["runs"] = Run.objects.listed_for(request.user).filter(status__in=UNFINISHED)[:3]
    return render(request, "machines.html", context)


@login_required
def show_machine(request: AuthenticatedRequest, pk: uuid.UUID) -> HttpResponse:
    """Show one machine; a POST renames it."""
    machine = get_object_or_404(machines_of_person(request), pk=pk)
    name = machine.hostname
    problem = ""
    if request.method == "POST":
        name = request.POST.get("name", "")
        length = len(" ".join(name.split()))
        if length <= MAX_NAME:
            machine.rename(name, actor=request.user)
            messages.success(request, f"Renamed to {machine.name}.")
            return redirect("machine", pk=machine.pk)
        problem = f"A name has at most {MAX_NAME} characters; this has {length}."
    memberships = machine.memberships.all()
    hardware = measured_hardware(machine)
    condition = machine_history.find_condition(machine)
    system, limits = machine_history.parse_condition(condition)
    current = current_membership(machine)
    speed = None
    if current:
        last_report = "" if current.is_alive else ago(current.last_seen)
        plan, step_seconds = current.figures.get("plan"), current.figures.get("step_seconds")
        speed = machine_condition.explain_speed(plan, step_seconds, system, last_report)
    version = condition.version if condition else ""
    context = {
        "machine": machine,
        "hardware": hardware,
        # A GPU that no sensor measures has no curves.
        "has_gpu": bool(system and (system.gpu, system.gpu_memory_total) != (None, None)),
        "memberships": memberships,
        "current": current,
        "condition": condition,
        "system": system,
        "limits": machine_condition.describe_limits(limits),
        "speed": speed,
        "newer_version": __version__ if machine_condition.is_older(version, __version__) else "",
        "typed": name,
        "problem": problem,
    }
    return render(request, "machine.html", context, status=422 if problem else 200)


@login_required
@require_safe
def show_machine_history(request: AuthenticatedRequest, pk: uuid.UUID) -> HttpResponse:
    """Return the last day of a machine as JSON, to its owner."""
    machine = get_object_or_404(Machine, pk=pk, owner=request.user)
    response = JsonResponse(machine_history.load_machine_history(machine))
    response["Cache-Control"] = "private, no-store"
    return response


@login_required
@require_POST
def control_machine(request: AuthenticatedRequest, pk: uuid.UUID, action: str) -> HttpResponse:
    """Pause, resume, confirm or revoke a machine."""
    machine = get_object_or_404(Machine, pk=pk, owner=request.user)
    if action == "pause":
        try:
            until = _read_pause_end(request)
        except StateError as error:
            messages.error(request, f"{machine.name} was not paused: {error}.")
            return redirect("machine", pk=pk)
        has_changed = MachinePause.start(machine, actor=request.user, until=until)
        outcome = "pauses with its next report and keeps its state."
        present_state = "paused"
    elif action == "resume":
        has_changed = MachinePause.end(machine, actor=request.user)
        outcome = "resumes with its next report."
        present_state = "not paused"
    elif action == "confirm":
        has_changed = machine.confirm(actor=request.user)
        outcome = "may prepare the text of your runs and sign for them."
        present_state = "confirmed"
    else:
        has_changed = machine.revoke(actor=request.user)
        outcome = "is revoked: this site and its peers refuse it."
        present_state = "revoked"
    if has_changed:
        messages.success(request, f"{machine.name} {outcome}")
    else:
        if machine.revoked:
            present_state = "revoked"
        messages.error(request, f"{machine.name} is {present_state} already.")
    own_run = request.user.runs.filter(slug=request.POST.get("run", "")).first()
    if own_run is not None:  # the button was on its page
        return redirect(own_run)
    return redirect("machines") if action == "revoke" else redirect("machine", pk=pk)


def _read_pause_end(request: AuthenticatedRequest) -> datetime | None:
    """Return when a pause ends that somebody orders in the machine's form; None: it has no end.

    Raises:
        StateError: What was typed is no time.
    """
    minutes = request.POST.get("offset", "")  # of the reader's clock ahead of UTC
    is_offset = re.fullmatch("-?[0-9]{1,4}", minutes) and abs(int(minutes)) < 24 * 60
    zone = dt_timezone(timedelta(minutes=int(minutes) if is_offset else 0))
    duration = request.POST.get("for", "").strip()
    until = request.POST.get("until", "").strip().replace("T", " ")
    end = find_pause_end(duration, until, datetime.now(zone))
    return None if end is None else datetime.fromtimestamp(end, UTC)


@login_required
@require_safe
def find_enrolment(request: AuthenticatedRequest) -> HttpResponse:
    """Find an enrolment by a code that is typed instead of its link."""
    typed = request.GET.get("code", "").strip()
    enrolment = Enrolment.find(typed) if typed else None
    if enrolment:
        return redirect("enrol", code=enrolment.code)
    return render(request, "enrol_code.html", {"typed": typed}, status=404 if typed else 200)


@login_required
def decide_enrolment(request: AuthenticatedRequest, code: str) -> HttpResponse:
    """Show an enrolment; a POST approves or refuses it."""
    enrolment = Enrolment.find(code)
    # An enrolment that somebody else has decided belongs to them.
    if enrolment is None or enrolment.decided_by_id not in (None, request.user.pk):
        return render(request, "enrol_code.html", {"typed": code}, status=404)
    refusal = ""
    if request.method == "POST":
        try:
            answer = request.POST.get("answer")
            if answer in ("approve", "confirm"):
                machine = enrolment.approve(request.user)
                if answer == "confirm":
                    machine.confirm(actor=request.user)
                    enrolment.refresh_from_db()
            else:
                enrolment.refuse(request.user)
        except UserError as error:
            refusal = error.sentence
    description = coordinator_messages.MachineDescription.model_validate(enrolment.description)
    context = {
        "enrolment": enrolment,
        "description": description,
        "refusal": refusal,
        # The person's newest run that waits for its text, which a confirmed machine prepares.
        "own_run": Run.objects.filter(
            owner=request.user, status=enums.RunStatus.DRAFT.value, manifest__isnull=True
        )
        .order_by("-pk")
        .first(),
        "runs": [],
    }
    if enrolment.status == "approved" and not refusal:
        context["runs"] = Run.objects.listed_for(request.user).filter(status__in=UNFINISHED)[:3]
    return render(request, "enrol.html", context, status=409 if refusal else 200)
