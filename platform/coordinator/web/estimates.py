"""What a run would take, while its form is filled in: an htmx fragment."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST

from coordinator.fleet.machines import measured
from coordinator.runs.estimate import LINES, download_seconds, estimate
from coordinator.runs.typical import MACHINES
from coordinator.web.forms import RunForm

OWN_MOST = 4  # of a person's machines, those seen last


@login_required
@require_POST
def run_estimate(request: HttpRequest) -> HttpResponse:
    """Of the form as typed so far; what is wrong with it is said when it is sent, and here only how much."""
    form = RunForm(request.POST, owner=request.user)
    spec = form.cleaned_data.get("spec") if form.is_valid() or "spec" in form.cleaned_data else None
    if spec is None:
        return render(request, "parts/estimate.html", {"problems": len(form.errors)})
    volunteers = form.volunteers()
    own = [(machine.name, measured(machine)) for machine in theirs(request)]
    known = [(name, hardware) for name, hardware in own if hardware]
    context = {
        "spec": spec,
        "parameters": spec.model.parameters,
        "tokens_each": spec.recipe.token_budget / spec.model.parameters,
        "groups": [
            ("Your machines", estimate(spec, known, volunteers)),
            ("Typical machines", estimate(spec, list(MACHINES), volunteers)),
        ],
        "unmeasured": [name for name, hardware in own if not hardware],
        "volunteers": volunteers,
        "download": [(line, download_seconds(spec, line)) for line in LINES],
    }
    return render(request, "parts/estimate.html", context)


def theirs(request: HttpRequest):
    found = request.user.machines.filter(revoked=None).select_related("measured")
    return found.order_by("-last_seen", "-enrolled")[:OWN_MOST]
