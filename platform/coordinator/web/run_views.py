"""Pages of runs: the home page, the list, one run, and its form."""

import json
from datetime import UTC, datetime
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from barnraise.protocol import enums
from coordinator.live.cross_site import mirror_sites
from coordinator.live.run_snapshot import RunSnapshot
from coordinator.runs import markdown
from coordinator.runs.models import Run
from coordinator.telemetry import checkpoints
from coordinator.web.forms import RunForm

LISTED = 50  # runs on one page
ENDED = 10  # finished runs on the first page, after the active ones
CONTROLS = {
    "launch": "Launched. Training starts once one of your machines has prepared the text.",
    "pause": "Paused. Machines keep their state and wait.",
    "resume": "Resumed.",
    "cancel": "Cancelled.",
    "archive": "Archived: the run is no longer listed and stays at this address.",
    "unarchive": "Unarchived: the run is listed again.",
}
ORGANISERS = "Only organisers create runs here: ask the staff to make you one."
UNFINISHED = [
    s.value
    for s in enums.RunStatus
    if s not in (enums.RunStatus.FINISHED, enums.RunStatus.CANCELLED)
]


@require_safe
def show_home(request: HttpRequest) -> HttpResponse:
    """Show the home page with some active runs."""
    visible = (
        Run.objects.visible_to(request.user).filter(status__in=UNFINISHED).select_related("owner")
    )
    return render(request, "home.html", {"runs": visible[:6], "site": site_url(request)})


@require_safe
def list_runs(request: HttpRequest) -> HttpResponse:
    """List active runs and the latest finished runs; `?finished` lists only the latter.

    `before` is the id of the last run of the previous page.
    """
    known = Run.objects.visible_to(request.user).listed().select_related("owner").order_by("-pk")
    under_way, over = known.filter(status__in=UNFINISHED), known.exclude(status__in=UNFINISHED)
    only_finished, before = "finished" in request.GET, parse_uuid(request.GET.get("before", ""))
    here = over if only_finished else under_way
    found = list(here.filter(pk__lt=before)[: LISTED + 1] if before else here[: LISTED + 1])
    context = {
        "only_finished": only_finished,
        "is_later_page": before is not None,
        "active_runs": [] if only_finished else found[:LISTED],
        "finished_runs": found[:LISTED] if only_finished else [] if before else over[:ENDED],
        "next_cursor": found[LISTED - 1].pk if len(found) > LISTED else None,
    }
    part = request.headers.get("HX-Request") == "true"
    return render(request, "parts/run_list.html" if part else "runs.html", context)


@login_required
def create_run(request: HttpRequest) -> HttpResponse:
    """Create a draft."""
    if not request.user.may_create_runs:
        raise PermissionDenied(ORGANISERS)
    form = RunForm(request.POST or None, owner=request.user)
    if request.method == "POST" and form.is_valid() and (run := form.save(request.user)):
        messages.success(request, "Draft created. Check it, then launch it.")
        return redirect(run)
    return render(request, "run_form.html", {"form": form}, status=422 if form.is_bound else 200)


@login_required
def edit_run(request: HttpRequest, slug: str) -> HttpResponse:
    """Edit a draft."""
    run = get_owned_run(request, slug)
    if not run.allows_action("edit"):
        messages.error(request, "The configuration of a launched run cannot be changed.")
        return redirect(run)
    form = RunForm(request.POST or None, run=run)
    if request.method == "POST" and form.is_valid() and form.save(request.user):
        messages.success(request, "Saved.")
        return redirect(run)
    return render(
        request, "run_form.html", {"form": form, "run": run}, status=422 if form.is_bound else 200
    )


@require_safe
def show_run(request: HttpRequest, slug: str) -> HttpResponse:
    """Show a run's page; its script then follows the run live."""
    run = get_visible_run(request, slug)
    spec, snapshot, mirrors = run.spec, RunSnapshot.capture(run), mirror_sites()
    public = run.may_see(AnonymousUser())
    if public:  # else it takes a session, which the others do not share
        request.reaches = [
            each for site in mirrors if not site.is_own for each in site.allowed_sources
        ]
    share = snapshot.run["tokens"] / max(1, snapshot.run["budget"])
    return render(
        request,
        "run.html",
        {
            "run": run,
            "spec": spec,
            "snapshot": snapshot,
            "share": min(1.0, share),
            "step_tokens": spec.recipe.step_sequences * spec.model.context,
            "events": [
                event | {"time": datetime.fromtimestamp(event["at"], UTC)}
                for event in snapshot.events.values()
            ],
            "workers": sorted(
                snapshot.workers.values(), key=lambda w: (w["person"], w["name"], w["id"])
            ),
            "may_control": run.may_control(request.user),
            "checkpoints": checkpoints.list_checkpoint_rows(run),
            "notes": markdown.render_html(run.notes),
            "refusal": join_problem(request, run),
            "invitations": run.invitations.filter(withdrawn=None)
            if run.may_control(request.user)
            else (),
            "site": site_url(request),
            "mirrors": json.dumps([each.page_data(f"/runs/{run.pk}/") for each in mirrors]),
            "follows": public,
            "has_machine": request.user.is_authenticated
            and request.user.machines.filter(revoked=None).exists(),
        },
    )


@require_safe
def show_checkpoints(request: HttpRequest, slug: str) -> HttpResponse:
    """Render the list of checkpoints alone, for htmx."""
    run = get_visible_run(request, slug)
    return render(
        request,
        "parts/checkpoints.html",
        {"run": run, "checkpoints": checkpoints.list_checkpoint_rows(run)},
    )


@login_required
@require_POST
def control_run(request: HttpRequest, slug: str, action: str) -> HttpResponse:
    """Launch, pause, resume, cancel, archive or unarchive a run."""
    run = get_owned_run(request, slug)
    if action not in CONTROLS:
        raise Http404
    if getattr(run, action)(actor=request.user):
        messages.success(request, CONTROLS[action])
    else:
        messages.error(request, f"The run is {run.status} now, so it cannot {action}.")
    return redirect(run)


def join_problem(request: HttpRequest, run: Run) -> str:
    """Return why this person cannot join the run, whatever their machines; "" if they can."""
    if run.is_over:
        return f"The run is {run.status}; nobody can join it any more."
    if run.access != "anyone" and not (
        request.user.is_authenticated and run.accepts_machines_of(request.user)
    ):
        return f"It {run.access_description}: ask {run.owner.shown_name} to let you in."
    return ""


def parse_uuid(text: str) -> UUID | None:
    """Parse a UUID; return None if it is none."""
    try:
        return UUID(text)
    except ValueError:
        return None


def get_visible_run(request: HttpRequest, slug: str) -> Run:
    """Return a run that the visitor can see, or raise Http404."""
    run = Run.objects.select_related("owner").find(slug)
    if run is None or not run.may_see(request.user):
        raise Http404
    return run


def get_owned_run(request: HttpRequest, slug: str) -> Run:
    """Return a run that the visitor may control; raise Http404 or PermissionDenied otherwise."""
    run = get_visible_run(request, slug)
    if not run.may_control(request.user):
        raise PermissionDenied("Only the run's owner can do this.")
    return run


def site_url(request: HttpRequest) -> str:
    """Return this site's address, as `barnraise login` takes it."""
    return f"{request.scheme}://{request.get_host()}"
