"""Estimates as htmx fragments: for the form of a run, and for people who may join one."""

from dataclasses import dataclass

from django.contrib.auth.decorators import login_required
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from barnraise.planning.hardware import Hardware
from barnraise.planning.lines import HOME_LINE, LINES
from barnraise.planning.search import WRITES_LIMIT
from barnraise.planning.speedup import estimate_speedup
from barnraise.spec import RunSpec
from coordinator.accounts.models import Machine, User
from coordinator.accounts.requests import AuthenticatedRequest
from coordinator.fleet.join import join_refusal, memory_shortfall
from coordinator.fleet.machine_state import measured_hardware
from coordinator.fleet.marked_names import twin_names
from coordinator.fleet.models import Membership
from coordinator.runs.estimate import MachineEstimate, download_seconds, estimate
from coordinator.runs.join_policy import Access
from coordinator.runs.models import Run
from coordinator.runs.optimizer_choice import OptimizerComparison, compare_optimizers
from coordinator.runs.reference_machines import REFERENCE_MACHINES
from coordinator.runs.strategy_choice import resolve_strategy
from coordinator.web.forms import RunForm
from coordinator.web.run_views import get_visible_run, parse_uuid
from coordinator.web.text_facts import TextFacts, read_text_facts
from coordinator.web.text_size import text_size

MAX_OWN_MACHINES = 4  # the last seen ones
USUAL_MACHINE = "12 GB GPU"


@login_required
@require_POST
def estimate_draft(request: AuthenticatedRequest) -> HttpResponse:
    """Estimate the form as filled in so far; of its errors, show only the number."""
    form = RunForm(request.POST, owner=request.user)
    form.full_clean()
    spec = form.cleaned_data.get("spec")
    if spec is None:
        return render(request, "parts/estimate.html", {"problems": len(form.errors)})
    volunteers = form.volunteers()
    is_open = form.cleaned_data["terms"].access == Access.ANYONE
    typical = estimate(spec, list(REFERENCE_MACHINES), volunteers)
    own = [(machine.name, measured_hardware(machine)) for machine in latest_machines(request)]
    measured = [(name, hardware) for name, hardware in own if hardware]
    summary = headline(typical)
    context = {
        "spec": spec,
        "parameters": spec.model.parameters,
        "tokens_per_parameter": spec.recipe.token_budget / spec.model.parameters,
        "groups": [
            ("Your machines", estimate(spec, measured, volunteers)),
            ("Typical machines", typical),
        ],
        "auto_reason": resolve_strategy(spec, is_open).assumed.reason,
        "headline": summary,
        "optimizers": compare_on_typical(spec, summary, volunteers),
        "text_size": text_size(spec, _prepared_text(request, spec)),
        "unmeasured": [name for name, hardware in own if not hardware],
        "volunteers": volunteers,
        "download": [(line, download_seconds(spec, line)) for line in LINES],
    }
    return render(request, "parts/estimate.html", context)


@dataclass(frozen=True)
class Headline:
    """The time of the whole run with one kind of machine, on a home line."""

    name: str
    seconds: float
    gain: str  # over one machine, in a sentence


def headline(typical: list[MachineEstimate]) -> Headline | None:
    """Choose the kind of machine for the first sentence: the usual one, or the least that fits."""
    fitting = [machine for machine in typical if machine.run_times]
    usual = next((machine for machine in fitting if machine.name == USUAL_MACHINE), None)
    chosen = usual or (fitting[0] if fitting else None)
    if chosen is None:
        return None
    on_home_line = chosen.run_times[0]
    return Headline(chosen.name, on_home_line.seconds, on_home_line.gain.sentence)


def compare_on_typical(
    spec: RunSpec, summary: Headline | None, volunteers: int
) -> OptimizerComparison | None:
    """Compare both optimizers on the kind of machine of the first sentence."""
    if summary is None:
        return None
    machine = next(each for each in REFERENCE_MACHINES if each[0] == summary.name)
    return compare_optimizers(spec, machine, volunteers)


def _prepared_text(request: AuthenticatedRequest, spec: RunSpec) -> TextFacts | None:
    """Return the figures of the edited draft's text, if its preparation still fits the form."""
    pk = parse_uuid(request.POST.get("draft", ""))
    run = Run.objects.filter(pk=pk, owner=request.user).first() if pk else None
    if run is None or run.draft_spec.text != spec.text:
        return None
    return read_text_facts(run)


@require_safe
def show_fit(request: HttpRequest, slug: str) -> HttpResponse:
    """Show whether the visitor's machines and typical machines fit the run."""
    run = get_visible_run(request, slug)
    machines = list(latest_machines(request))
    names = twin_names(machines)
    own = [
        estimate_fit(
            run,
            names.get(machine.pk, machine.name),
            measured_hardware(machine),
            join_refusal(run, machine),
        )
        for machine in machines
    ]
    typical = [
        estimate_fit(
            run, name, hardware, memory_shortfall(run, hardware.memory, hardware.device_memory)
        )
        for name, hardware in REFERENCE_MACHINES
    ]
    context = {
        "run": run,
        "own": own,
        "typical": typical,
        "gain": gain_by_joining(run, own, typical),
        "crew_command": crew_command(run, [*own, *typical]),
    }
    return render(request, "parts/hardware_check.html", context)


def crew_command(run: Run, machines: list[MachineEstimate]) -> str:
    """Return the command that starts a crew, where a machine needs one; "" where none does.

    A machine needs others if the model does not fit it, or leaves its memory so far that the daily
    writes to its disk limit it.
    """
    if run.spec.recipe.mixes_weights:
        return ""
    is_weak = any(
        machine.plan.bottleneck == WRITES_LIMIT if machine.plan else machine.refusal
        for machine in machines
    )
    return f"barnraise join {run.slug or run.pk} --crew" if is_weak else ""


def gain_by_joining(run: Run, own: list[MachineEstimate], typical: list[MachineEstimate]) -> str:
    """Return what a run gains with one more machine on a home line, in a sentence; "" if unknown.

    The visitor's own machine stands for all, or the usual one.
    """
    usual = [machine for machine in typical if machine.name == USUAL_MACHINE]
    fitting = [machine for machine in (*own, *usual) if machine.plan]
    if not fitting:
        return ""
    machines = Membership.everywhere.newest().alive_in(run).count() + 1
    rate = fitting[0].tokens_per_second
    return estimate_speedup(run.spec, rate, HOME_LINE, machines).sentence


def estimate_fit(run: Run, name: str, hardware: Hardware | None, refusal: str) -> MachineEstimate:
    """Estimate one machine; one that is not measured yet has neither a refusal nor a rate."""
    if hardware is None:
        return MachineEstimate(name)
    if refusal:
        return MachineEstimate(name, refusal)
    return estimate(run.spec, [(name, hardware)], 1)[0]


def latest_machines(request: HttpRequest) -> QuerySet[Machine]:
    """Select the visitor's machines that were seen last; none for anonymous visitors."""
    if not isinstance(request.user, User):
        return Machine.objects.none()
    machines = request.user.machines.filter(revoked=None).select_related("measured")
    return machines.order_by("-last_seen", "-enrolled")[:MAX_OWN_MACHINES]
