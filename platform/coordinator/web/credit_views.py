"""Credit: the leaderboard and the certificates."""

import uuid

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_safe

from coordinator.accounts.models import Machine, User
from coordinator.credit import leaderboard as credit_leaderboard
from coordinator.lib.ttl_cache import TtlCache

GROUP_LABELS = {"people": "People", "teams": "Teams", "machines": "Machines", "runs": "Runs"}
PERIOD_LABELS = {"week": "7 days", "month": "30 days", "year": "A year", "all": "All time"}
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
    context = {"person": volunteer, "record": record, "badges": credit_leaderboard.BADGES}
    return render(request, "volunteer.html", context)


@require_safe
def redirect_to_certificate(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """Redirect from a machine to its owner's certificate: `barnraise join` prints this address."""
    machine = get_object_or_404(Machine, pk=pk)
    return redirect("volunteer", pk=machine.owner_id)
