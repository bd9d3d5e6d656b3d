"""How long pages take, one after another, as a visitor, a volunteer and the staff see them."""

import time
from importlib import import_module
from statistics import median

import httpx
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY

from coordinator.accounts.models import User
from coordinator.runs.models import Run


def cookies(user: User) -> dict[str, str]:
    """Of somebody who has logged in."""
    session = import_module(settings.SESSION_ENGINE).SessionStore()
    session[SESSION_KEY], session[HASH_SESSION_KEY] = str(user.pk), user.get_session_auth_hash()
    session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    session.create()
    return {settings.SESSION_COOKIE_NAME: session.session_key}


def pages(url: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by page: so many askings of each, those of a run of another run each time."""
    volunteer = User.objects.get(email="volunteer-1@example.org")
    staff = User.objects.create_user("staff@example.org", is_staff=True, name="Staff")
    slugs = list(
        Run.objects.filter(slug__startswith="run-")
        .order_by("created", "pk")
        .values_list("slug", flat=True)
    )
    asked = {
        "/": None, "/runs/": None, "/runs/{slug}/": None, "/credit/": None, "/credit/?by=teams": None,
        f"/volunteers/{volunteer.pk}/": None, "/machines/": volunteer, "/notifications/": volunteer,
        "/account/": volunteer, "/runs/new/": staff, "/admin/": staff, "/admin/accounts/machine/": staff,
        "/admin/audit/auditentry/": staff,
    }  # fmt: skip
    found: dict[str, list[float]] = {}
    for path, user in asked.items():
        with httpx.Client(base_url=url, cookies=cookies(user) if user else None) as http:
            for n in range(rounds + 2):
                began = time.perf_counter()
                answer = http.get(path.format(slug=slugs[n % len(slugs)]))
                took = 1000 * (time.perf_counter() - began)
                assert answer.status_code == 200, (path, answer.status_code, answer.text[:300])
                if n >= 2:  # the first ones compile templates
                    found.setdefault(
                        path if "volunteers" not in path else "/volunteers/…/", []
                    ).append(took)
    return found


def table(found: dict[str, list[float]]) -> str:
    lines = [f"{'page':32} {'median ms':>10} {'p95 ms':>8}"]
    for path, took in found.items():
        lines.append(f"{path:32} {median(took):10.1f} {sorted(took)[int(0.95 * len(took))]:8.1f}")
    return "\n".join(lines)
