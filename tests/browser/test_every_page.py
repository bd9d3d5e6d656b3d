"""Every page of the site has no axe-core finding in either theme and fits a phone."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from django.contrib import admin
from django.urls import URLPattern, URLResolver, get_resolver, resolve
from helpers.browser.navigation import click_and_load
from helpers.browser.screenshots import (
    FIND_BROKEN_WORDS,
    FIND_SPARE_ROOM,
    UPSTREAM,
    assert_still,
    check_page,
    open_page,
    show_whole_page,
)
from helpers.site.live_site import log_in
from playwright.sync_api import Page, expect

# Name of the screenshot → address of a page that visitors without an account can open.
PUBLIC_PAGES = {
    "home": "/",
    "runs": "/runs/",
    "run": "/runs/{run}/",
    "leaderboard": "/credit/",
    "mirrors": "/mirrors/",
    "documents": "/docs/",
    "document": "/docs/people.md",
    "downloads": "/download/",
    "licence": "/licence/",
    "status": "/status",
    "leaderboard-teams": "/credit/?by=teams&period=week",
    "runs-compared": "/runs/compare/?run={run}&run={finished_run}",
    "volunteer": "/volunteers/{jonas}/",
    "teams-all": "/teams/",
    "team-seen": "/teams/{team}/",
    "login": "/accounts/login/",
    "login-code": "/accounts/login/code/",
    "signup": "/accounts/signup/",
    "inactive": "/accounts/inactive/",
    "password-reset": "/accounts/password/reset/",
    "password-reset-done": "/accounts/password/reset/done/",
    "password-reset-key": "/accounts/password/reset/key/1-x/",
    "password-reset-key-done": "/accounts/password/reset/key/done/",
    "unsubscribe": "/notifications/unsubscribe/{unsubscribe}/",
    "nothing-here": "/runs/nothing-here/",
}
# The same for pages that Ida opens, who owns the examples and belongs to the staff.
SIGNED_IN_PAGES = {
    "home-inside": "/",
    "mirrors-staff": "/mirrors/",
    "run-owned": "/runs/{run}/",
    "run-cancelled": "/runs/{cancelled_run}/",
    "run-draft": "/runs/{draft}/",
    "run-new": "/runs/new/",
    "run-edit": "/runs/{draft}/edit/",
    "run-terms": "/runs/{run}/terms/",
    "run-extend": "/runs/{run}/extend/",
    "run-events": "/runs/{run}/events/",
    "run-verdicts": "/runs/{run}/verdicts/",
    "run-exclude": "/runs/{run}/exclude/",
    "run-invited": "/runs/{run}/invited/{run_invitation}/",
    "machines": "/machines/",
    "machine": "/machines/{machine}/",
    "machine-in-crew": "/machines/{crew_machine}/",
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
    "invitation": "/teams/invitations/{team_invitation}/",
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
# The same for the admin's pages, whose frame is Unfold's.
ADMIN_PAGES = {
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
    "admin-announcement": "/admin/staff/announcement/{announcement}/change/",
    "admin-audit": "/admin/audit/auditentry/",
    "admin-audit-entry": "/admin/audit/auditentry/{audit_entry}/change/",
    "admin-schedule": "/admin/django_celery_beat/periodictask/",
    "admin-password": "/admin/password_change/",
}
# Routes without a page: fragments, actions, downloads, and steps that test_people.py covers.
ROUTES_WITHOUT_A_PAGE = {
    "account_confirm_login_code",
    "account_email_verification_sent",
    "account_set_password",
    "admin_figures",
    "admin_test_letter",
    "download",
    "healthz",
    "machine_certificate",
    "machine_confirm",
    "machine_history",
    "machine_pause",
    "machine_resume",
    "machine_revoke",
    "mark_notifications_read",
    "metrics",
    "mfa_authenticate",
    "mfa_deactivate_totp",
    "mfa_download_recovery_codes",
    "mfa_edit_webauthn",
    "mfa_login_webauthn",
    "mfa_reauthenticate",
    "mfa_reauthenticate_webauthn",
    "mfa_remove_webauthn",
    "mfa_view_recovery_codes",
    "readyz",
    "run_card",
    "run_checklist",
    "run_checkpoints",
    "run_clone",
    "run_control",
    "run_estimate",
    "run_fits",
    "run_invite",
    "run_snapshot",
    "run_verdict_sign",
    "run_clear",
    "run_withdraw",
    "swarm",
    "team_invite",
    "team_leave",
    "team_promote",
    "team_rename",
    "team_withdraw_invitation",
    "token_revoke",
    "volunteer_card",
    "webhook_control",
    "webhook_types",
    "worker_curves",
}
# The admin's pages are alike, and so are the forms of django-allauth and pages of one form or one
# list: `make test` looks at one of each kind, `make test-all` at all.
ADMIN_SAMPLE = {"admin", "admin-runs", "admin-run", "admin-person", "admin-verdicts", "admin-audit"}
LIKE_OTHERS = {
    "licence",
    "leaderboard-teams",
    "team-seen",
    "login-code",
    "inactive",
    "password-reset-done",
    "password-reset-key",
    "password-reset-key-done",
    "mirrors-staff",
    "run-terms",
    "run-extend",
    "run-edit",
    "run-events",
    "run-exclude",
    "enrol-code",
    "tokens",
    "leave",
    "notification-settings",
    "webhooks",
    "team-new",
    "password",
    "logout",
    "reauthenticate",
    "addresses",
    "sessions",
    "recovery-codes-none",
    "passkey-new",
    *(ADMIN_PAGES.keys() - ADMIN_SAMPLE),
}
# Where the columns of a run's page end, above what stands below them all.
FIND_COLUMN_ENDS = """() => {
  const parts = ['.run-charts', '.run-side-cards', '.progress-card'];
  const boxes = parts.map((part) => document.querySelector(part).getBoundingClientRect());
  const [charts, side, progress] = boxes;
  if (innerWidth < 1000) return [0];
  return [charts.bottom, progress.left > charts.left ? progress.bottom : side.bottom];
}"""
# Seconds or milliseconds since 1970 where a date should stand: no figure is so large.
MOMENT_AS_NUMBER = re.compile(r"\b1,[5-9]\d\d,\d{3},\d{3}\b")
THIRD_PARTY_ADMIN = "django_celery_beat"  # only the list that the staff need has a screenshot


@pytest.fixture(scope="module")
def names(site) -> dict[str, str]:
    return site.create_examples()


@pytest.fixture(scope="module")
def visitor(site, browser) -> Iterator[Page]:
    with open_page(browser, site) as page:
        yield page


@pytest.fixture(scope="module")
def signed_in(site, browser) -> Iterator[Page]:
    with open_page(browser, site) as page:
        log_in(page)
        yield page


def all_route_names(resolver: URLResolver) -> Iterator[str]:
    """Yield the names of the routes that a person can open."""
    for pattern in resolver.url_patterns:
        if isinstance(pattern, URLPattern):
            yield pattern.name
        elif pattern.app_name not in ("admin", "ninja"):
            yield from all_route_names(pattern)


def route_name(address: str) -> str:
    """Return the name of the route of an address with placeholders such as {run}."""
    ids = dict.fromkeys(("jonas", "machine", "crew_machine", "run_id"), UUID(int=0))
    path = address.partition("?")[0]
    path = re.sub(r"\{(\w+)\}", lambda placeholder: str(ids.get(placeholder[1], "x")), path)
    return resolve(path).url_name


def mark_slow(pages: dict[str, str]) -> list:
    """Return the names of pages; those that are like others are left to `make test-all`."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name
        for name in pages
    ]


def test_every_route_has_a_screenshot_or_an_exemption():
    routes = set(all_route_names(get_resolver())) - {None}
    pages = {**PUBLIC_PAGES, **SIGNED_IN_PAGES}
    del pages["nothing-here"]  # the page for addresses without a route
    assert routes - ROUTES_WITHOUT_A_PAGE == {route_name(address) for address in pages.values()}
    assert routes >= ROUTES_WITHOUT_A_PAGE
    admin_lists = {
        f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        for model in admin.site._registry
        if model._meta.app_label != THIRD_PARTY_ADMIN
    }
    assert admin_lists <= set(ADMIN_PAGES.values())


@pytest.mark.parametrize("name", mark_slow(PUBLIC_PAGES))
def test_public_page_passes_the_check(names, visitor, name):
    answer = visitor.goto(PUBLIC_PAGES[name].format(**names))
    assert answer.status == (404 if name == "nothing-here" else 200)
    assert_still(visitor)
    check_page(visitor, name)
    if name == "document":
        visitor.set_viewport_size({"width": 360, "height": 900})
        assert not visitor.evaluate(FIND_BROKEN_WORDS)
        visitor.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("name", mark_slow(SIGNED_IN_PAGES))
def test_signed_in_page_passes_the_check(names, signed_in, name):
    assert signed_in.goto(SIGNED_IN_PAGES[name].format(**names)).status == 200
    assert_still(signed_in)
    check_page(signed_in, name)


@pytest.mark.parametrize("name", mark_slow(ADMIN_PAGES))
def test_admin_page_passes_the_check(names, signed_in, name):
    assert signed_in.goto(ADMIN_PAGES[name].format(**names)).status == 200
    shown = signed_in.locator("body").inner_text()
    assert not MOMENT_AS_NUMBER.search(shown), MOMENT_AS_NUMBER.search(shown)
    check_page(signed_in, name, not_ours=UPSTREAM, renew=True)


def test_run_page_is_ordered_by_need(names, visitor):
    """On a phone the way in comes soon, and the page ends: what few need is folded."""
    views = ((360, 5500), (1440, 4800))
    for name, (width, most_pixels) in itertools.product(("run", "paused_run"), views):
        visitor.set_viewport_size({"width": width, "height": 900})
        visitor.goto(f"/runs/{names[name]}/")
        expect(visitor.locator("[data-connection]")).to_have_attribute("data-connection", "live")
        assert_still(visitor)
        show_whole_page(visitor, width)
        top = visitor.locator(".join-card").evaluate("card => card.getBoundingClientRect().top")
        height = visitor.evaluate("document.documentElement.scrollHeight")
        assert top <= 1500 and height <= most_pixels, (name, width, top, height)
        spare = visitor.evaluate(FIND_SPARE_ROOM)
        assert not spare, f"cards of {width} px with empty room below: {spare}"
        ends = visitor.evaluate(FIND_COLUMN_ENDS)
        assert max(ends) - min(ends) < 300, f"{name}: columns of {width} px end at {ends}"
    visitor.set_viewport_size({"width": 1280, "height": 900})
    visitor.goto(f"/runs/{names['finished_run']}/")
    samples = visitor.locator("#samples")
    expect(samples).to_contain_text("stood where the meadow ends")
    assert samples.evaluate("card => card.getBoundingClientRect().bottom") < 900


def test_charts_zoom_together_and_save_what_they_show(names, visitor):
    address = f"/runs/{names['run']}/"
    visitor.goto(address)
    plot = visitor.locator("[data-loss-chart] [data-plot]")
    expect(plot).to_have_attribute("role", "slider")
    show_all = visitor.get_by_role("button", name="Show all")
    plot.press("+")
    expect(show_all).to_be_enabled()
    plot.press("0")
    expect(show_all).to_be_disabled()
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    middle = box["y"] + box["height"] / 2
    visitor.mouse.move(box["x"] + box["width"] * 0.4, middle)
    visitor.mouse.down()
    visitor.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=4)
    visitor.mouse.up()
    expect(show_all).to_be_enabled()
    visitor.locator("[data-loss-chart]").get_by_text("Save", exact=True).click()
    with visitor.expect_download() as download:
        visitor.get_by_role("button", name="Values (CSV)").first.click()
    head = Path(download.value.path()).read_text().splitlines()[0]
    assert head == 'Tokens,Training,"Training, smoothed",Validation'
    visitor.goto("about:blank")
    visitor.goto(f"{address}#x=active&smooth=0.5&from=10&to=600")
    expect(visitor.locator("[data-preference=xAxis]")).to_have_value("active")
    expect(visitor.locator("[data-smoothing-number]")).to_have_text("0.50")
    expect(show_all).to_be_enabled()


def test_runs_selected_in_the_list_are_compared(names, signed_in):
    signed_in.goto("/runs/")
    compare = signed_in.get_by_role("button", name="Compare")
    expect(compare).to_be_disabled()
    for run in (names["run"], names["cancelled_run"]):
        signed_in.locator(f"#runs input[name=run][value='{run}']").check()
    click_and_load(compare)
    expect(signed_in.get_by_role("heading", name="Settings that differ")).to_be_visible()
    expect(signed_in.locator("[data-plot]")).to_have_attribute("role", "slider")
