"""Estimates as htmx fragments: for the form of a run, and for people who may join one."""

from collections.abc import Iterable

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from barnraise.planning.hardware import Hardware
from coordinator.accounts.models import Machine
from coordinator.fleet.join import join_refusal, memory_shortfall
from coordinator.fleet.machine_state import measured_hardware
from coordinator.runs.estimate import LINE_MEGABITS, MachineEstimate, download_seconds, estimate
from coordinator.runs.models import Run
from coordinator.runs.reference_machines import REFERENCE_MACHINES
from coordinator.web.forms import RunForm
from coordinator.web.run_views import get_visible_run

MAX_OWN_MACHINES = 4  # those seen last


@login_required
@require_POST
def estimate_draft(request: HttpRequest) -> HttpResponse:
    """Estimate the form as filled in so far; of its errors, show only the number."""
    form = RunForm(request.POST, owner=request.user)
    spec = form.cleaned_data.get("spec") if form.is_valid() or "spec" in form.cleaned_data else None
    if spec is None:
        return render(request, "parts/estimate.html", {"problems": len(form.errors)})
    volunteers = form.volunteers()
    own = [(machine.name, measured_hardware(machine)) for machine in list_own_machines(request)]
    known = [(name, hardware) for name, hardware in own if hardware]
    context = {
        "spec": spec,
        "parameters": spec.model.parameters,
        "tokens_per_parameter": spec.recipe.token_budget / spec.model.parameters,
        "groups": [
            ("Your machines", estimate(spec, known, volunteers)),
            ("Typical machines", estimate(spec, list(REFERENCE_MACHINES), volunteers)),
        ],
        "unmeasured": [name for name, hardware in own if not hardware],
        "volunteers": volunteers,
        "download": [(line, download_seconds(spec, line)) for line in LINE_MEGABITS],
    }
    return render(request, "parts/estimate.html", context)


@require_safe
def show_fit(request: HttpRequest, slug: str) -> HttpResponse:
    """Show whether the visitor's machines and typical machines fit the run."""
    run = get_visible_run(request, slug)
    own = [
        estimate_fit(run, machine.name, measured_hardware(machine), join_refusal(run, machine))
        for machine in list_own_machines(request)
    ]
    typical = [
        estimate_fit(run, name, has, memory_shortfall(run, has.memory, has.device_memory))
        for name, has in REFERENCE_MACHINES
    ]
    return render(
        request, "parts/hardware_check.html", {"run": run, "own": own, "typical": typical}
    )


def estimate_fit(run: Run, name: str, hardware: Hardware | None, refused: str) -> MachineEstimate:
    """Estimate one machine; one that is not measured yet has neither a refusal nor a rate."""
    if hardware is None:
        return MachineEstimate(name)
    return (
        MachineEstimate(name, refused) if refused else estimate(run.spec, [(name, hardware)], 1)[0]
    )


def list_own_machines(request: HttpRequest) -> Iterable[Machine]:
    """List the visitor's machines; empty for anonymous visitors."""
    if not request.user.is_authenticated:
        return []
    found = request.user.machines.filter(revoked=None).select_related("measured")
    return found.order_by("-last_seen", "-enrolled")[:MAX_OWN_MACHINES]
