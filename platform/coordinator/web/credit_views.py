"""Credit: the leaderboard and the certificates."""

import uuid

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from coordinator.accounts.models import User
from coordinator.credit import leaderboard as credit_leaderboard
from coordinator.lib.ttl_cache import TtlCache

BY = {"people": "People", "teams": "Teams", "machines": "Machines", "runs": "Runs"}
PERIODS = {"week": "7 days", "month": "30 days", "year": "A year", "all": "All time"}
leaders_cache: TtlCache[tuple[str, str], list[credit_leaderboard.LeaderboardRow]] = TtlCache(
    30.0
)  # a sum over everybody's credit is of no one moment


@require_safe
def show_leaderboard(request: HttpRequest) -> HttpResponse:
    """Show the leaderboard; unknown parameters mean people and all time."""
    by, period = request.GET.get("by"), request.GET.get("period")
    by, period = by if by in BY else "people", period if period in PERIODS else "all"
    context = {"by": by, "period": period, "kinds": BY.items(), "periods": PERIODS.items()}
    places = leaders_cache.get((by, period), lambda: credit_leaderboard.leaderboard(by, period))
    return render(request, "leaderboard.html", {**context, "places": places})


@require_safe
def show_volunteer(request: HttpRequest, person: uuid.UUID) -> HttpResponse:
    """Show a person's certificate.

    Without credit only the person sees it: a public page would invite sign-ups for the link alone.
    """
    found = get_object_or_404(User, pk=person, is_active=True)
    record = credit_leaderboard.volunteer_record(found)
    if not record.tokens and request.user != found:
        raise Http404
    return render(
        request,
        "volunteer.html",
        {"person": found, "record": record, "badges": credit_leaderboard.BADGES},
    )
