"""A machine that trains by its owner's rules, as its page and the page of its run show it."""

from datetime import datetime, timedelta

import pytest
from helpers.browser.navigation import click_and_load
from helpers.browser.screenshots import check_page
from helpers.site.live_site import enrol, log_in, wait_until
from playwright.sync_api import Page, expect


@pytest.mark.slow
def test_machine_outside_its_hours_says_so_on_every_page(site, page: Page):
    log_in(page)
    slug = site.launch_run("Hay run", 5_000_000)
    enrol(site, page, "stall")
    now = datetime.now()
    # Hours that begin in two hours, and end before now.
    hours = f"{now + timedelta(hours=2):%H:%M}-{now - timedelta(hours=1):%H:%M}"
    rules = ("--hours", hours, "--busy-cpu", "90", "--pause-for", "blender", "--cpu", "50")
    limits = site.barnraise("stall", "limits", *rules, "--month-up", "20GB", "--memory", "4GB")
    assert limits.wait(120) == 0, site.log("limits-stall")
    joined = site.barnraise("stall", "join", slug, "--threads", "1")
    wait_until(lambda: site.status("stall").get("activity") == "paused", "a pause by its hours")
    assert "by its hours" in site.status("stall")["reason"]
    assert site.status("stall")["pause"]["reason"] == "hours"

    page.goto(f"/runs/{slug}/")
    row = page.locator("tr", has_text="stall").first
    expect(row).to_contain_text("paused by its hours, until")
    page.goto("/machines/")
    click_and_load(page.get_by_role("link", name="stall"))
    wait_until(
        lambda: page.reload() and page.get_by_text("by its hours. The times are").count(),
        "the reason on the machine's page",
    )
    for text in (hours, "pauses above 90 % by other programs", "blender", "20 GB", "4 GB"):
        expect(page.locator("section", has_text="Limits and rules")).to_contain_text(text)
    check_page(page, "machine-rules")

    page.get_by_label("For", exact=True).fill("90m")
    click_and_load(page.get_by_role("button", name="Pause for this time"))
    expect(page.get_by_text("but does not train until")).to_be_visible()
    check_page(page, "machine-paused-for-a-time")
    joined.terminate()
    assert joined.wait(120) == 0, site.log("join-stall")
