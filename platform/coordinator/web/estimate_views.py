"""What a run would take: while its form is filled in, and for who thinks of joining it. htmx fragments."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from barnraise.planning.hardware import Hardware
from coordinator.fleet.join import join_refusal, memory_shortfall
from coordinator.fleet.machine_state import measured_hardware
from coordinator.runs.estimate import LINE_MEGABITS, MachineEstimate, download_seconds, estimate
from coordinator.runs.models import Run
from coordinator.runs.reference_machines import REFERENCE_MACHINES
from coordinator.web.forms import RunForm
from coordinator.web.run_views import get_visible_run

OWN_MOST = 4  # of a person's machines, those seen last


@login_required
@require_POST
def estimate_draft(request: HttpRequest) -> HttpResponse:
    """Of the form as typed so far; what is wrong with it is said when it is sent, and here only how much."""
    form = RunForm(request.POST, owner=request.user)
    spec = form.cleaned_data.get("spec") if form.is_valid() or "spec" in form.cleaned_data else None
    if spec is None:
        return render(request, "parts/estimate.html", {"problems": len(form.errors)})
    volunteers = form.volunteers()
    own = [(machine.name, measured_hardware(machine)) for machine in own_machines(request)]
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
    """Whether this person's machines would do for the run, or machines that people have."""
    run = get_visible_run(request, slug)
    own = [
        estimate_fit(run, machine.name, measured_hardware(machine), join_refusal(run, machine))
        for machine in own_machines(request)
    ]
    typical = [
        estimate_fit(run, name, has, memory_shortfall(run, has.memory, has.device_memory))
        for name, has in REFERENCE_MACHINES
    ]
    return render(
        request, "parts/hardware_check.html", {"run": run, "own": own, "typical": typical}
    )


def estimate_fit(run: Run, name: str, hardware: Hardware | None, refused: str) -> MachineEstimate:
    """One that has not measured itself yet is neither refused nor given a rate: nobody knows of its GPU."""
    if hardware is None:
        return MachineEstimate(name)
    return (
        MachineEstimate(name, refused) if refused else estimate(run.spec, [(name, hardware)], 1)[0]
    )


def own_machines(request: HttpRequest):
    """Nobody's, of who is not signed in."""
    if not request.user.is_authenticated:
        return []
    found = request.user.machines.filter(revoked=None).select_related("measured")
    return found.order_by("-last_seen", "-enrolled")[:OWN_MOST]
