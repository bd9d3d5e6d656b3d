"""People in a browser: sign-up, passkeys, teams, notifications, a ban, deleting the account."""

import re

import pytest
from helpers.browser.navigation import click_and_load
from helpers.browser.screenshots import DIALOG, check_page
from helpers.site.live_site import CODE, log_in, submit_login, wait_until
from playwright.sync_api import Browser, Page, expect

from coordinator.notify.notification_types import NotificationType

EVE, SECRET = "eve@example.org", "oak-and-spruce-7"
CREATE_NOTIFICATIONS = f"""
from django.db import transaction
from coordinator.accounts.models import User
from coordinator.notify.models import Notification
from coordinator.notify.notification_types import NotificationDraft, NotificationType
eve = User.objects.get(email={EVE!r})
with transaction.atomic():  # the task that sends emails sees all or none
    for kind in NotificationType:
        title = "Evening shift: " + kind.label
        text = "A sentence that says more."
        Notification.create_once(NotificationDraft(eve, kind, kind, title, text, "/runs/"))
"""


def test_person_signs_up_adds_a_passkey_creates_a_team_and_leaves(site, browser: Browser):
    """Use `localhost`, because browsers bind a passkey to a host name."""
    address = site.url.replace("127.0.0.1", "localhost")
    context = browser.new_context(base_url=address, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    script_errors: list[str] = []
    page.on("pageerror", lambda error: script_errors.append(str(error)))
    sign_up(site, page)
    add_a_passkey(page)
    sign_in_with_the_passkey(page)
    create_a_team(site, page)
    use_notifications_and_webhooks(site, page)
    delete_the_account(page)
    context.close()
    assert not script_errors


def sign_up(site, page: Page) -> None:
    page.goto("/accounts/signup/")
    page.get_by_label("Email").fill(EVE)
    page.get_by_label("Password").fill("short")
    page.get_by_label("Name").fill("Eve")
    click_and_load(page.get_by_role("button", name="Create account"))
    expect(page.locator(".error")).to_contain_text("too short")
    check_page(page, "signup-mistake")
    page.get_by_label("Password").fill(SECRET)
    click_and_load(page.get_by_role("button", name="Create account"))
    expect(page.get_by_role("heading", name="Check your email")).to_be_visible()
    check_page(page, "verify")
    page.get_by_label("Code").fill(CODE.search(site.newest_email(EVE))[1])
    click_and_load(page.get_by_role("button", name="Confirm"))
    expect(page.get_by_text("Eve", exact=True).first).to_be_visible()


def add_a_passkey(page: Page) -> None:
    protocol = page.context.new_cdp_session(page)
    protocol.send("WebAuthn.enable")
    authenticator = {
        "protocol": "ctap2",
        "transport": "internal",
        "hasResidentKey": True,
        "hasUserVerification": True,
        "isUserVerified": True,
        "automaticPresenceSimulation": True,
    }
    protocol.send("WebAuthn.addVirtualAuthenticator", {"options": authenticator})
    page.goto("/account/")
    click_and_load(page.get_by_role("link", name="Passkeys, authenticator app and recovery codes"))
    page.goto("/accounts/2fa/webauthn/add/")
    page.get_by_label("Password").fill(SECRET)
    click_and_load(page.get_by_role("button", name="Confirm"))
    page.get_by_label("Name").fill("This laptop")
    page.get_by_label("Passwordless").check()
    click_and_load(page.get_by_role("button", name="Add"))
    expect(page.get_by_role("heading", name="Recovery Codes")).to_be_visible()
    check_page(page, "recovery-codes")
    page.goto("/accounts/2fa/webauthn/")
    expect(page.get_by_text("This laptop")).to_be_visible()
    check_page(page, "passkeys")
    page.goto("/accounts/2fa/totp/activate/")
    expect(page.locator("main img")).to_be_visible()


def sign_in_with_the_passkey(page: Page) -> None:
    page.locator("details.menu summary").click()
    check_page(page, "menu")
    click_and_load(page.get_by_role("button", name="Sign out"))
    page.goto("/accounts/login/")
    click_and_load(page.get_by_role("button", name="Use a passkey"))
    expect(page.get_by_text("Eve", exact=True).first).to_be_visible()


def create_a_team(site, page: Page) -> None:
    page.goto("/teams/")
    check_page(page, "teams-none")
    click_and_load(page.get_by_role("link", name="New team"))
    click_and_load(page.get_by_role("button", name="Create team"))
    expect(page.locator(".error")).to_contain_text("1 to 60 characters")
    check_page(page, "team-new-mistake")
    page.get_by_label("Name").fill("The <b>Joiners</b> \u202eof the very long name 🧵")
    click_and_load(page.get_by_role("button", name="Create team"))
    page.get_by_label("Email address").fill("guest@example.org")
    click_and_load(page.get_by_role("button", name="Send invitation"))
    expect(page.get_by_text("An invitation was sent to guest@example.org")).to_be_visible()
    link = re.search(r"/teams/invitations/\S+", site.newest_email("guest@example.org"))[0]
    page.goto(link)
    expect(page.get_by_role("button", name="Join the team")).to_be_visible()
    page.goto("/teams/")


def use_notifications_and_webhooks(site, page: Page) -> None:
    page.goto("/notifications/")
    check_page(page, "notifications-none")
    page.goto("/notifications/webhooks/")
    page.get_by_label("URL").fill("https://10.0.0.1/hook")
    click_and_load(page.get_by_role("button", name="Add webhook"))
    expect(page.locator(".error")).to_contain_text("not a public address")
    check_page(page, "webhooks-mistake")
    page.get_by_label("URL").fill(f"{site.url}/hook")
    click_and_load(page.get_by_role("button", name="Add webhook"))
    click_and_load(page.get_by_role("button", name="Send test"))
    expect(page.get_by_text("A test call was queued")).to_be_visible()

    def failure_is_shown() -> bool:
        page.reload()
        return page.get_by_text("1 failure in a row").count() == 1

    wait_until(failure_is_shown, "the answer to a test call", 30)
    site.manage("shell", "-v", "0", "-c", CREATE_NOTIFICATIONS)
    page.goto("/notifications/")
    assert "Evening shift" in site.newest_email(EVE, f"{len(NotificationType)} notifications")


def delete_the_account(page: Page) -> None:
    page.goto("/account/delete/")
    if page.get_by_label("Password").count():
        page.get_by_label("Password").fill(SECRET)
        click_and_load(page.get_by_role("button", name="Confirm"))
    page.get_by_label("Your email address").fill("wrong@example.org")
    click_and_load(page.get_by_role("button", name="Delete my account"))
    expect(page.locator(".error")).to_contain_text("Your address here is")
    check_page(page, "delete-account-mistake")
    page.get_by_label("Your email address").fill(EVE)
    click_and_load(page.get_by_role("button", name="Delete my account"))
    expect(page.get_by_text("Your account is deleted")).to_be_visible()


@pytest.mark.slow  # test_journey.py bans a machine; tests/platform/staff has the admin's actions
def test_staff_see_the_dashboard_announce_and_ban(site, page: Page):
    log_in(page)
    site.manage(
        "prepare_owner", "--email", "mallory@example.org", "--password", SECRET, "--name", "Mallory"
    )
    page.goto("/admin/")
    refreshed_at = page.locator("#figures").get_by_text("refreshed every five seconds")
    first = refreshed_at.inner_text()
    wait_until(lambda: refreshed_at.inner_text() != first, "figures that refresh", 20)
    page.goto("/admin/staff/announcement/add/")
    page.locator("[name=text]").fill("The water is off tonight from 22:00.")
    click_and_load(page.get_by_role("button", name="Save", exact=True))
    page.goto("/")
    expect(page.get_by_text("The water is off tonight")).to_be_visible()
    check_page(page, "announcement")
    page.goto("/admin/accounts/user/?q=mallory")
    click_and_load(page.get_by_role("link", name="mallory@example.org"))
    page.get_by_role("link", name="Ban", exact=True).click()
    dialog = page.locator("#dialog")
    dialog.locator("[name=reason]").fill("Spam, again and again.")
    check_page(page, "admin-ban", not_ours=DIALOG)
    click_and_load(dialog.get_by_role("button", name="Ban"))
    expect(page.get_by_text("Mallory is banned")).to_be_visible()
    page.goto("/admin/audit/auditentry/?q=Mallory")
    expect(page.get_by_text("user.ban").first).to_be_visible()
    mallorys_page = page.context.browser.new_context(base_url=site.url).new_page()
    submit_login(mallorys_page, "mallory@example.org", SECRET)
    expect(mallorys_page.get_by_text("Spam, again and again.")).to_be_visible()
    check_page(mallorys_page, "banned")
    mallorys_page.context.close()
    page.goto("/admin/staff/announcement/")
    click_and_load(page.get_by_role("link", name="The water is off tonight").first)
    page.get_by_role("link", name="Withdraw").click()
    click_and_load(page.locator("#dialog").get_by_role("button", name="Withdraw"))
    expect(page.get_by_text("Withdrawn.", exact=True)).to_be_visible()
