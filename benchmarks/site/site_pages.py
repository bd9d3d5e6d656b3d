"""Measure how long pages take, one after another, for a visitor, a volunteer and the staff."""

import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median

import httpx
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY

from coordinator.accounts.models import User
from coordinator.runs.models import Run

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.site.second_factor import add_authenticator_app

WARM_UP_ROUNDS = 2  # of each page: they compile the templates


def session_cookies(user: User) -> dict[str, str]:
    """Return the cookies of a logged-in user."""
    session = import_module(settings.SESSION_ENGINE).SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    session.create()
    return {settings.SESSION_COOKIE_NAME: session.session_key}


def measure_pages(url: str, rounds: int) -> dict[str, list[float]]:
    """Request each page `rounds` times, and a run's page for another run each time.

    Returns:
        Milliseconds of each request, by page.
    """
    volunteer = User.objects.get(email="volunteer-1@example.org")
    staff = User.objects.create_user("staff@example.org", is_staff=True, name="Staff")
    add_authenticator_app(staff)  # without a second factor the admin lets nobody in
    runs = Run.objects.filter(slug__startswith="run-").order_by("created", "pk")
    slugs = list(runs.values_list("slug", flat=True))
    users = {
        "/": None,
        "/runs/": None,
        "/runs/{slug}/": None,
        "/credit/": None,
        "/credit/?by=teams": None,
        f"/volunteers/{volunteer.pk}/": None,
        "/machines/": volunteer,
        "/notifications/": volunteer,
        "/account/": volunteer,
        "/runs/new/": staff,
        "/admin/": staff,
        "/admin/accounts/machine/": staff,
        "/admin/audit/auditentry/": staff,
    }
    durations: dict[str, list[float]] = {}
    for path, user in users.items():
        name = "/volunteers/…/" if "volunteers" in path else path
        with httpx.Client(base_url=url, cookies=session_cookies(user) if user else None) as http:
            for n in range(rounds + WARM_UP_ROUNDS):
                start = time.perf_counter()
                answer = http.get(path.format(slug=slugs[n % len(slugs)]))
                milliseconds = 1000 * (time.perf_counter() - start)
                assert answer.status_code == 200, (path, answer.status_code, answer.text[:300])
                if n >= WARM_UP_ROUNDS:
                    durations.setdefault(name, []).append(milliseconds)
    return durations


def format_table(durations: dict[str, list[float]]) -> str:
    """Return a table of the pages' median and p95."""
    lines = [f"{'page':32} {'median ms':>10} {'p95 ms':>8}"]
    for path, took in durations.items():
        lines.append(f"{path:32} {median(took):10.1f} {sorted(took)[int(0.95 * len(took))]:8.1f}")
    return "\n".join(lines)
