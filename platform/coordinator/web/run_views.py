"""Pages of runs: the home page, the list, one run, and its form."""

import json
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.db.models import Count
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_POST, require_safe

from barnraise.formats import format_count, format_duration
from barnraise.protocol import enums
from coordinator.accounts.models import User
from coordinator.accounts.requests import AuthenticatedRequest
from coordinator.fleet.doubts import find_suspended_people
from coordinator.fleet.marked_names import list_keys, mark_name
from coordinator.fleet.suspension import reports_suspension
from coordinator.lib import csp
from coordinator.lib.ttl_cache import TtlCache
from coordinator.live.activity_feed import list_events
from coordinator.live.cross_site import MirrorSite, mirror_sites
from coordinator.live.run_snapshot import RunSnapshot
from coordinator.runs import markdown
from coordinator.runs.join_policy import Access
from coordinator.runs.models import PublishedText, Run
from coordinator.telemetry import samples
from coordinator.telemetry.live_totals import LiveTotals, live_totals
from coordinator.telemetry.run_cards import describe_progress
from coordinator.telemetry.run_state import HeadTile, RunState, describe_state
from coordinator.telemetry.run_table import state_facts
from coordinator.web import owner_checklist
from coordinator.web.document_views import find_finished_model
from coordinator.web.forms import RunForm
from coordinator.web.model_card import load_model_card
from coordinator.web.share_cards import draw_card
from coordinator.web.text_facts import read_text_facts
from coordinator.web.text_size import text_size

EVENTS_PER_PAGE = 100
MAX_INVITATIONS = 50  # links on the owner's page
MAX_ROWS = 20  # machines in the page as the server writes it; its script adds the others
CARD_SECONDS = 300  # for which a picture of a link is current enough
_totals: TtlCache[None, LiveTotals] = TtlCache(5.0)  # however many people open the home page
cards_cache: TtlCache[UUID, bytes] = TtlCache(60.0, max_entries=200)
CONTROLS = {
    "launch": "Launched. Training starts once one of your machines has prepared the text.",
    "pause": "Paused. Machines keep their state and wait.",
    "resume": "Resumed.",
    "finish": "Finished. Machines save the model they have now, and share it.",
    "cancel": "Cancelled.",
    "archive": "Archived: the run is no longer listed and stays at this address.",
    "unarchive": "Unarchived: the run is listed again.",
}
ORGANISERS = "Only organisers create runs here: ask the staff to make you one."
UNFINISHED = [
    status.value
    for status in enums.RunStatus
    if status not in (enums.RunStatus.FINISHED, enums.RunStatus.CANCELLED)
]


@require_safe
def show_home(request: HttpRequest) -> HttpResponse:
    """Show the home page with some active runs."""
    listed = Run.objects.listed_for(request.user).filter(status__in=UNFINISHED)
    context = {
        "runs": listed.select_related("owner")[:6],
        "site": site_url(request),
        "totals": _totals.get(None, live_totals),
        "finished": find_finished_model(),
    }
    return render(request, "home.html", context)


@login_required
def create_run(request: AuthenticatedRequest) -> HttpResponse:
    """Create a draft, and launch it at once if the form says so."""
    if not request.user.may_create_runs:
        raise PermissionDenied(ORGANISERS)
    form = RunForm(request.POST or None, owner=request.user)
    if request.method == "POST" and form.is_valid():
        run = form.save(request.user)
        if run and request.POST.get("then") == "launch" and run.launch(actor=request.user):
            messages.success(request, CONTROLS["launch"])
            return redirect(run)
        if run:
            messages.success(request, "Draft created. Check it, then launch it.")
            return redirect(run)
    return render(request, "run_form.html", {"form": form}, status=422 if form.is_bound else 200)


@login_required
def edit_run(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Edit a draft."""
    run = get_owned_run(request, slug)
    if not run.is_editable:
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
    mirrors = mirror_sites()
    is_public = run.is_public
    response = render(request, "run.html", _run_context(request, run, mirrors, is_public))
    if is_public:  # another run takes a session, which the other mirrors do not share
        sources = [source for site in mirrors if not site.is_own for source in site.allowed_sources]
        response["Content-Security-Policy"] = csp.page_policy(sources)
    return response


def _run_context(
    request: HttpRequest, run: Run, mirrors: Collection[MirrorSite], is_public: bool
) -> dict[str, Any]:
    """Collect what the run's page shows to this visitor."""
    spec = run.spec
    snapshot = RunSnapshot.capture(run)
    share = snapshot.run["tokens"] / max(1, snapshot.run["budget"])
    may_control = run.may_control(request.user)
    text = read_text_facts(run)
    is_of_bytes = spec.text.tokenizer == "bytes"
    is_owner = isinstance(request.user, User) and request.user.pk == run.owner_id
    own_machines = count_machines(request)
    has_checklist = is_owner and owner_checklist.is_shown(run)
    model = load_model_card(run)
    state = describe_state(state_facts(snapshot.run, has_model=model.last is not None))
    groups = samples.list_sample_groups(run)
    return {
        "run": run,
        "spec": spec,
        "text": text,
        "tokens_per_byte": 1.0 if is_of_bytes else text and text.tokens_per_byte,
        "text_size": text_size(spec, text),
        "parent": Run.objects.mentioned_to(request.user).filter(pk=run.parent_id).first(),
        "share_sentence": (
            f"{format_count(spec.model.parameters)} parameters, {describe_progress(run)} tokens "
            "trained by volunteers' machines."
        ),
        "has_checklist": has_checklist,
        **(owner_checklist.checklist_context(run, site_url(request)) if has_checklist else {}),
        "snapshot": snapshot,
        "share": min(1.0, share),
        "suspended": reports_suspension(
            (machine["person"], machine["activity"])
            for machine in snapshot.workers.values()
            if machine["alive"]
        ),
        "suspended_people": list_suspended(run) if may_control else [],
        "step_tokens": spec.step_tokens,
        "events": with_times(snapshot.events.values()),
        "older_events": max(0, snapshot.run["event_count"] - len(snapshot.events)),
        "machines": sorted(
            snapshot.workers.values(),
            key=lambda machine: (machine["person"], machine["name"], machine["id"]),
        )[:MAX_ROWS],
        "may_control": may_control,
        "model": model,
        "cards": state.cards,
        "tiles": order_tiles(state),
        "elapsed": format_elapsed(snapshot),
        "samples": groups,
        "preview": PublishedText.find(run).preview,
        "awaits_samples": awaits_samples(run),
        "notes": markdown.render_html(run.notes),
        "refusal": join_problem(request, run),
        **(_invitation_context(run) if may_control else {}),
        "site": site_url(request),
        "mirrors": json.dumps([site.page_data(f"/runs/{run.pk}/") for site in mirrors]),
        "has_failover": is_public,
        "has_machine": own_machines > 0,
    }


def awaits_samples(run: Run) -> bool:
    """Return whether a run that trains is going to write samples."""
    return bool(run.spec.prompts) and run.ledger_tokens > 0 and not run.is_over


def order_tiles(state: RunState) -> list[dict[str, Any]]:
    """Return all tiles for the page: those of the state in their order, then hidden ones. Pure."""
    hidden = [tile for tile in HeadTile if tile not in state.tiles]
    return [
        {"name": tile.value, "is_shown": tile in state.tiles} for tile in (*state.tiles, *hidden)
    ]


def format_elapsed(snapshot: RunSnapshot) -> str:
    """Write how long a run has trained, to its end or until now. Pure."""
    started, ended = snapshot.run["started"], snapshot.run["ended"]
    if started is None:
        return "–"
    return format_duration(max(0.0, (ended or snapshot.now) - started))


def list_suspended(run: Run) -> list[dict[str, object]]:
    """List the people whose updates are withheld, with the marks of their keys."""
    people = find_suspended_people(run)
    keys = list_keys(run) if people else {}
    return [{"pk": person.pk, "name": mark_name(person, keys)} for person in people]


def _invitation_context(run: Run) -> dict[str, Any]:
    """Return what the owner's card of invitation links shows: the newest ones, by one query."""
    if run.access != Access.INVITATION:
        return {}
    links = run.invitations.filter(withdrawn=None).annotate(uses=Count("guests"))
    newest = list(links[: MAX_INVITATIONS + 1])
    return {
        "invitations": newest[:MAX_INVITATIONS],
        "invitations_hidden_after": MAX_INVITATIONS if len(newest) > MAX_INVITATIONS else 0,
    }


def with_times(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events of the activity feed with their times as dates."""
    return [event | {"time": datetime.fromtimestamp(event["at"], UTC)} for event in events]


def count_machines(request: HttpRequest) -> int:
    """Count the visitor's machines, without revoked ones."""
    if not isinstance(request.user, User):
        return 0
    return request.user.machines.filter(revoked=None).count()


@require_safe
def show_events(request: HttpRequest, slug: str) -> HttpResponse:
    """List all events of a run, the newest first; `?before=` continues the list."""
    run = get_visible_run(request, slug)
    before = parse_moment(request.GET.get("before", ""))
    events, older = cut_page(list_events(run, before, EVENTS_PER_PAGE + 1), EVENTS_PER_PAGE)
    context = {"run": run, "events": with_times(events), "older": older, "is_first": before is None}
    return render(request, "run_events.html", context)


def cut_page(events: list[dict[str, Any]], count: int) -> tuple[list[dict[str, Any]], float | None]:
    """Return a page of at most `count` events, and the time of its last one if older ones follow.

    The next page begins before that time, so events of one moment are all on one page. Pure.
    """
    page = events[:count]
    if len(events) <= count:
        return page, None
    while len(page) > 1 and page[-1]["at"] == events[len(page)]["at"]:
        page.pop()
    return page, page[-1]["at"]


def parse_moment(text: str) -> datetime | None:
    """Parse seconds since 1970; return None if they are none."""
    try:
        return datetime.fromtimestamp(float(text), UTC)
    except (ValueError, OverflowError, OSError):
        return None


@require_safe
def show_checkpoints(request: HttpRequest, slug: str) -> HttpResponse:
    """Render the list of checkpoints and the card of the model, for htmx."""
    run = get_visible_run(request, slug)
    context = {
        "run": run,
        "model": load_model_card(run),
        "samples": samples.list_sample_groups(run),
        "awaits_samples": awaits_samples(run),
    }
    return render(request, "parts/run_checkpoints.html", context)


@require_safe
@cache_control(public=True, max_age=CARD_SECONDS)
def show_run_card(request: HttpRequest, slug: str) -> HttpResponse:
    """Draw the picture for links to a run; only a run that everybody may see has one."""
    run = get_visible_run(request, slug)
    if not run.is_public:
        raise Http404

    def draw() -> bytes:
        facts = [
            f"{format_count(run.spec.model.parameters)} parameters",
            f"{describe_progress(run)} tokens",
            f"{run.status.capitalize()}, by {run.owner.shown_name}",
        ]
        return draw_card(run.name, facts, min(1.0, run.ledger_tokens / max(1, run.token_budget)))

    return HttpResponse(cards_cache.get(run.pk, draw), content_type="image/png")


@login_required
@require_safe
def show_checklist(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Render the owner's checklist alone, for htmx."""
    run = get_owned_run(request, slug)
    context = owner_checklist.checklist_context(run, site_url(request))
    return render(request, "parts/checklist.html", context)


@login_required
@require_POST
def control_run(request: AuthenticatedRequest, slug: str, action: str) -> HttpResponse:
    """Launch, pause, resume, finish, cancel, archive or unarchive a run."""
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
        return f"The run is {run.status}; nobody can join it now."
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
