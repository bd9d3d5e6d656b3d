"""Credit: the leaderboard and the certificates."""

import uuid

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe

from barnraise.formats import format_count
from coordinator.accounts.models import Machine, User
from coordinator.credit import leaderboard as credit_leaderboard
from coordinator.credit import progress
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import Run
from coordinator.web.share_cards import draw_card

GROUP_LABELS = {"people": "People", "teams": "Teams", "machines": "Machines", "runs": "Runs"}
PERIOD_LABELS = {"week": "7 days", "month": "30 days", "year": "A year", "all": "All time"}
CARD_SECONDS = 300  # for which a picture of a link is current enough
cards_cache: TtlCache[uuid.UUID, bytes] = TtlCache(60.0, max_entries=200)
# Keyed by (what is ranked, period). A sum over everybody's credit may be half a minute old.
leaders_cache: TtlCache[tuple[str, str], list[credit_leaderboard.LeaderboardRow]] = TtlCache(30.0)


@require_safe
def show_leaderboard(request: HttpRequest) -> HttpResponse:
    """Show the leaderboard; unknown parameters mean people and all time."""
    by = request.GET.get("by", "")
    if by not in GROUP_LABELS:
        by = "people"
    period = request.GET.get("period", "")
    if period not in PERIOD_LABELS:
        period = "all"
    context = {
        "by": by,
        "period": period,
        "kinds": GROUP_LABELS.items(),
        "periods": PERIOD_LABELS.items(),
        "places": leaders_cache.get(
            (by, period), lambda: credit_leaderboard.leaderboard(by, period)
        ),
    }
    return render(request, "leaderboard.html", context)


@require_safe
def show_volunteer(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """Show a person's certificate.

    Without credit only the person sees it: a public page would invite sign-ups for the link alone.
    """
    volunteer = get_object_or_404(User, pk=pk, is_active=True)
    record = credit_leaderboard.volunteer_record(volunteer)
    if not record.tokens and request.user != volunteer:
        raise Http404
    credit = progress.credit_of(volunteer)
    days = list(credit.filter(tokens__gt=0).order_by().values_list("day", flat=True).distinct())
    current, longest = progress.streaks(days)
    mentioned = Run.objects.mentioned_to(request.user).filter(
        pk__in=[run.pk for run, _ in record.runs]
    )
    context = {
        "person": volunteer,
        "record": record,
        "runs": [(run, tokens) for run, tokens in record.runs if run in set(mentioned)],
        "by_day": progress.tokens_by_day(credit),
        "rank": progress.rank_change(volunteer),
        "current_streak": current,
        "longest_streak": longest,
        "share_sentence": (
            f"{format_count(record.tokens)} tokens for models that people train together."
        ),
    }
    return render(request, "volunteer.html", context)


@require_safe
@cache_control(public=True, max_age=CARD_SECONDS)
def show_volunteer_card(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """Draw the picture for links to a certificate; without credit there is none."""
    volunteer = get_object_or_404(User, pk=pk, is_active=True)

    def draw() -> bytes:
        record = credit_leaderboard.volunteer_record(volunteer)
        if not record.tokens:
            raise Http404
        models = f"{len(record.runs)} model{'' if len(record.runs) == 1 else 's'}"
        facts = [
            f"{format_count(record.tokens)} tokens for {models}",
            f"{record.machines} machine{'' if record.machines == 1 else 's'}",
            f"Badge: {record.badges[-1]}",
        ]
        return draw_card(volunteer.shown_name, facts, 1.0)

    return HttpResponse(cards_cache.get(pk, draw), content_type="image/png")


@require_safe
def redirect_to_certificate(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """Redirect from a machine to its owner's certificate: `barnraise join` prints this address."""
    machine = get_object_or_404(Machine, pk=pk)
    return redirect("volunteer", pk=machine.owner_id)
