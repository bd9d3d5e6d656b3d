"""An organiser and a volunteer in a browser: estimates, a paused machine, invitation links."""

import re

import pytest
from helpers.browser.navigation import click_and_load
from helpers.browser.screenshots import check_page
from helpers.site.live_site import enrol, log_in, wait_until
from playwright.sync_api import Page, expect


def test_organiser_estimates_creates_cancels_and_archives_a_run(site, page: Page):
    log_in(page)
    page.goto("/runs/new/")
    estimate = page.locator("#estimate")
    expect(estimate).to_contain_text("8 GB laptop")
    expect(estimate).to_contain_text("10 of these, 15 Mb/s up, 112 down")
    page.get_by_label("Expected volunteers").fill("25")
    expect(estimate).to_contain_text("25 of these, 100 Mb/s")
    page.locator(".preset", has_text="gpt3-175b").click()
    expect(estimate).to_contain_text("does not fit")
    check_page(page, "run-new-estimated")
    page.locator(".preset", has_text="gpt-nano").click()
    page.locator("[name=name]").fill("Chess club run")
    page.get_by_label("People I invite by link").check()
    page.get_by_label("Notes").fill(
        "# Why\n\nTo *see* what happens.\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    page.locator("summary", has_text="Advanced").click()
    page.locator("[name=report_every]").fill("1")
    click_and_load(page.get_by_role("button", name="Create draft"))
    expect(page.get_by_role("heading", name="Chess club run")).to_be_visible()
    expect(page.get_by_role("heading", name="Why")).to_be_visible()
    page.get_by_label("Note", exact=True).fill("the chess club")
    click_and_load(page.get_by_role("button", name="Create link"))
    expect(page.locator("#invitations code")).to_contain_text("/invited/")
    click_and_load(page.get_by_role("button", name="Launch"))
    cancel_run(page)
    click_and_load(page.get_by_role("button", name="Archive"))
    expect(page.get_by_text("Archived")).to_be_visible()
    click_and_load(page.get_by_role("button", name="Copy run"))
    expect(page.locator("[name=name]")).to_have_value("Chess club run (copy)")


def cancel_run(page: Page) -> None:
    """Cancel the run of an open page: the first time go back, the second time confirm."""
    page.get_by_role("button", name="Cancel run").click()
    question = page.get_by_role("dialog")
    expect(question.get_by_role("button", name="Go back")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_have_count(0)
    page.get_by_role("button", name="Cancel run").click()
    click_and_load(question.get_by_role("button", name="Cancel run"))


@pytest.mark.slow  # test_journey.py trains, pauses and resumes too
def test_machine_pauses_on_its_page_and_trains_until_its_run_ends(site, page: Page):
    """The real worker pauses when its directive says so, and resumes from the same step."""
    log_in(page)
    settings = ("recipe.learning_rate=3e-3", "recipe.evaluate_every=4000")
    slug = site.launch_run("Byre run", 5_000_000, *settings)
    enrol(site, page, "byre")
    joined = site.barnraise("byre", "join", slug, "--threads", "1")
    wait_until(lambda: site.status("byre").get("activity") == "training", "training")
    page.goto(f"/runs/{slug}/")
    checkpoints = page.locator("#checkpoints tbody tr")
    wait_until(lambda: page.reload() and checkpoints.count() > 0, "a checkpoint")
    page.goto("/machines/")
    click_and_load(page.get_by_role("link", name="byre"))
    expect(page.get_by_text("FLOP/s")).to_be_visible()
    click_and_load(page.get_by_role("button", name="Pause", exact=True))
    expect(page.get_by_text("Paused", exact=True)).to_be_visible()
    wait_until(lambda: site.status("byre")["activity"] == "paused", "a pause on the machine")
    paused_step = site.status("byre")["step"]
    check_failed_refresh(page)
    check_page(page, "machine-paused")
    page.goto(f"/runs/{slug}/")
    check_refreshed_model_card(page)
    check_page(page, "run-organised")
    page.goto("/machines/")
    assert site.status("byre")["step"] == paused_step
    click_and_load(page.get_by_role("link", name="byre"))
    click_and_load(page.get_by_role("button", name="Resume"))
    wait_until(lambda: site.status("byre")["step"] > paused_step, "training again")

    page.goto(f"/runs/{slug}/")
    cancel_run(page)
    assert joined.wait(600) == 0, site.log("join-byre")


def check_failed_refresh(page: Page) -> None:
    """Check that the page of a machine states since when its charts are not updated."""
    staleness = page.locator("[data-stale]")
    show = "document.dispatchEvent(new Event('visibilitychange'))"
    with page.expect_response("**/history/") as first:
        page.evaluate(show)
    first.value.finished()
    page.route("**/history/", lambda route: route.abort())
    page.evaluate(show)
    expect(staleness).to_contain_text("Not updated since")
    page.unroute("**/history/")
    page.evaluate(show)
    expect(staleness).to_be_empty()


def check_refreshed_model_card(page: Page) -> None:
    """Check that an open page receives the card of the model, and that what is open stays so."""
    page.evaluate("document.querySelector('#model').outerHTML = '<div id=model hidden></div>'")
    page.locator("#checkpoints").dispatch_event("refresh")
    expect(page.get_by_role("heading", name="Get the model")).to_be_visible()
    page.get_by_text("Use it in Python").click()
    page.evaluate("document.querySelector('#model > p').textContent = 'stale'")
    page.locator("#checkpoints").dispatch_event("refresh")
    expect(page.locator("#model > p").first).to_contain_text("tokens")
    expect(page.get_by_text("After the download, with transformers")).to_be_visible()


def test_access_invitation_token_and_certificate_pages_work(site, page: Page):
    log_in(page)
    run = site.manage("create_run", "--owner", "organiser@example.org", "--name", "Pages")
    page.goto(f"/runs/{run}/")
    slug = re.search(r"barnraise join http\S+/runs/([\w-]+)", page.content())[1]
    page.goto(f"/runs/{slug}/terms/")
    page.get_by_label("Minimum RAM (GB)").fill("lots")
    click_and_load(page.get_by_role("button", name="Save"))
    expect(page.get_by_text("must be a number", exact=False).first).to_be_visible()
    expect(page.get_by_label("Minimum RAM (GB)")).to_have_value("lots")
    page.get_by_label("Minimum RAM (GB)").fill("8")
    page.get_by_label("People I invite by link").check()
    click_and_load(page.get_by_role("button", name="Save"))
    click_and_load(page.get_by_role("button", name="Create link"))
    page.goto(page.locator("#invitations code").inner_text())
    expect(page.get_by_role("button", name="Accept")).to_be_visible()
    page.goto("/account/tokens/")
    expect(page.get_by_role("heading", name="Create a token")).to_be_visible()
    page.locator("#id_name").fill("nightly")
    click_and_load(page.get_by_role("button", name="Create token"))
    expect(page.locator(".command code")).to_contain_text("brn_")
    check_page(page, "token-created")
    page.goto("/account/")
    click_and_load(page.get_by_role("link", name="Your certificate"))
    expect(page.get_by_text("This certifies that")).to_be_visible()
    page.goto("/credit/?by=teams&period=week")
    expect(page.get_by_role("link", name="Teams", exact=True).first).to_have_attribute(
        "aria-current", "page"
    )
