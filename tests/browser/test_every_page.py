"""Every page of the site has no axe-core finding in either theme and fits a phone."""

import re
from collections.abc import Iterable, Iterator
from uuid import UUID

import pytest
from django.contrib import admin
from django.urls import URLPattern, URLResolver, get_resolver, resolve
from helpers.live_site import log_in
from helpers.screenshots import UPSTREAM, check_page, open_page
from playwright.sync_api import Page

# Name of the screenshot → address, for visitors without an account.
OUTSIDE = {
    "home": "/",
    "runs": "/runs/",
    "run": "/runs/{run}/",
    "leaderboard": "/credit/",
    "mirrors": "/mirrors/",
    "leaderboard-teams": "/credit/?by=teams&period=week",
    "volunteer": "/volunteers/{jonas}/",
    "teams-all": "/teams/",
    "team-seen": "/teams/{team}/",
    "login": "/accounts/login/",
    "signup": "/accounts/signup/",
    "inactive": "/accounts/inactive/",
    "password-reset": "/accounts/password/reset/",
    "password-reset-done": "/accounts/password/reset/done/",
    "password-reset-key": "/accounts/password/reset/key/1-x/",
    "password-reset-key-done": "/accounts/password/reset/key/done/",
    "unsubscribe": "/notifications/unsubscribe/{off}/",
    "nothing-here": "/runs/nothing-here/",
}
# The same for Ida, who owns the examples and belongs to the staff.
INSIDE = {
    "home-inside": "/",
    "mirrors-staff": "/mirrors/",
    "run-owned": "/runs/{run}/",
    "run-over": "/runs/{over}/",
    "run-draft": "/runs/{draft}/",
    "run-new": "/runs/new/",
    "run-edit": "/runs/{draft}/edit/",
    "run-terms": "/runs/{run}/terms/",
    "run-extend": "/runs/{run}/extend/",
    "run-verdicts": "/runs/{run}/verdicts/",
    "run-invited": "/runs/{run}/invited/{bid}/",
    "machines": "/machines/",
    "machine": "/machines/{machine}/",
    "enrol-code": "/machines/enrol/",
    "enrol": "/machines/enrol/{code}/",
    "account": "/account/",
    "tokens": "/account/tokens/",
    "leave": "/account/delete/",
    "notifications": "/notifications/",
    "notification-settings": "/notifications/settings/",
    "webhooks": "/notifications/webhooks/",
    "teams": "/teams/",
    "team-new": "/teams/new/",
    "team": "/teams/{team}/",
    "invitation": "/teams/invitations/{token}/",
    "logout": "/accounts/logout/",
    "reauthenticate": "/accounts/reauthenticate/",
    "addresses": "/accounts/email/",
    "password": "/accounts/password/change/",
    "sessions": "/accounts/sessions/",
    "two-factor": "/accounts/2fa/",
    "totp": "/accounts/2fa/totp/activate/",
    "recovery-codes-none": "/accounts/2fa/recovery-codes/generate/",
    "passkeys-none": "/accounts/2fa/webauthn/",
    "passkey-new": "/accounts/2fa/webauthn/add/",
}
# The admin's pages; their frame is Unfold's.
ADMIN = {
    "admin": "/admin/",
    "admin-runs": "/admin/runs/run/",
    "admin-run": "/admin/runs/run/{run_id}/change/",
    "admin-run-history": "/admin/runs/run/{run_id}/history/",
    "admin-people": "/admin/accounts/user/",
    "admin-person": "/admin/accounts/user/{jonas}/change/",
    "admin-machines": "/admin/accounts/machine/",
    "admin-machine": "/admin/accounts/machine/{machine}/change/",
    "admin-enrolments": "/admin/accounts/enrolment/",
    "admin-teams": "/admin/accounts/team/",
    "admin-team": "/admin/accounts/team/{team_id}/change/",
    "admin-rules": "/admin/accounts/sitesettings/",
    "admin-memberships": "/admin/fleet/membership/",
    "admin-membership": "/admin/fleet/membership/{membership}/change/",
    "admin-verdicts": "/admin/fleet/verdictrecord/",
    "admin-verdictrecord": "/admin/fleet/verdictrecord/{verdict}/change/",
    "admin-logs": "/admin/eventlog/origin/",
    "admin-log": "/admin/eventlog/origin/{log}/change/",
    "admin-proofs": "/admin/eventlog/forkproof/",
    "admin-announcements": "/admin/staff/announcement/",
    "admin-announce": "/admin/staff/announcement/add/",
    "admin-announcement": "/admin/staff/announcement/{said}/change/",
    "admin-audit": "/admin/audit/auditentry/",
    "admin-audit-entry": "/admin/audit/auditentry/{entry}/change/",
    "admin-schedule": "/admin/django_celery_beat/periodictask/",
    "admin-password": "/admin/password_change/",
}
# Routes without a page: fragments, actions, downloads, and steps that test_people.py covers.
OTHERS = {
    "admin_figures", "machine_pause", "machine_resume", "machine_revoke", "metrics", "healthz", "readyz",
    "mark_notifications_read", "run_checkpoints", "run_clone", "run_control", "run_estimate", "run_fits", "run_invite",
    "worker_curves", "run_snapshot", "run_withdraw", "status", "team_invite", "team_leave", "team_promote",
    "team_rename", "team_withdraw_invitation", "token_revoke", "webhook_control", "webhook_types",
    "account_confirm_login_code", "account_email_verification_sent", "account_set_password", "mfa_authenticate",
    "mfa_deactivate_totp", "mfa_download_recovery_codes", "mfa_edit_webauthn", "mfa_login_webauthn",
    "mfa_reauthenticate", "mfa_reauthenticate_webauthn", "mfa_remove_webauthn", "mfa_view_recovery_codes",
}  # fmt: skip
THIRD_PARTY_ADMIN = "django_celery_beat"  # only the list that the staff need has a screenshot


@pytest.fixture(scope="module")
def names(site) -> dict[str, str]:
    return site.furnish()


@pytest.fixture(scope="module")
def outside(site, browser) -> Iterator[Page]:
    with open_page(browser, site) as page:
        yield page


@pytest.fixture(scope="module")
def inside(site, browser) -> Iterator[Page]:
    with open_page(browser, site) as page:
        log_in(page)
        yield page


def routes(resolver: URLResolver) -> Iterator[str]:
    """Yield the names of the routes that a person can open."""
    for each in resolver.url_patterns:
        if isinstance(each, URLPattern):
            yield each.name
        elif each.app_name not in ("admin", "ninja"):
            yield from routes(each)


def route_names(addresses: Iterable[str]) -> set[str]:
    """Return the names of the routes of these addresses."""
    some = {
        "jonas": UUID(int=0),
        "machine": UUID(int=0),
        "run_id": UUID(int=0),
        "bid": "x",
        "slug": "x",
    }
    filled = re.compile(r"\{(\w+)\}")
    return {
        resolve(
            filled.sub(lambda name: str(some.get(name[1], "x")), each.partition("?")[0])
        ).url_name
        for each in addresses
    }


def test_every_route_has_a_screenshot_or_an_exemption():
    there = set(routes(get_resolver())) - {None}
    seen = route_names(
        each for name, each in {**OUTSIDE, **INSIDE}.items() if name != "nothing-here"
    )
    assert there - OTHERS == seen and there >= OTHERS
    lists = {
        f"/admin/{one._meta.app_label}/{one._meta.model_name}/" for one in admin.site._registry
    }
    assert {each for each in lists if THIRD_PARTY_ADMIN not in each} <= set(ADMIN.values())


@pytest.mark.parametrize("name", OUTSIDE)
def test_public_page_passes_the_check(names, outside, name):
    answer = outside.goto(OUTSIDE[name].format(**names))
    assert answer.status == (404 if name == "nothing-here" else 200)
    check_page(outside, name)


@pytest.mark.parametrize("name", INSIDE)
def test_page_of_a_signed_in_person_passes_the_check(names, inside, name):
    assert inside.goto(INSIDE[name].format(**names)).status == 200
    check_page(inside, name)


@pytest.mark.parametrize("name", ADMIN)
def test_admin_page_passes_the_check(names, inside, name):
    assert inside.goto(ADMIN[name].format(**names)).status == 200
    check_page(inside, name, not_ours=UPSTREAM, renew=True)
