"""An organiser's and a volunteer's way in the browser: what a run takes, a machine paused from the site, links."""

import re

from helpers.live_site import enrol, log_in, wait_until
from helpers.screenshots import check_page
from playwright.sync_api import Page, expect


def test_organiser_estimates_creates_pauses_and_archives_a_run(
    site, page: Page
):
    """The real worker stops by its directive, keeps its peers and its state, and goes on."""
    log_in(page)
    page.goto("/runs/new/")
    estimate = page.locator("#estimate")
    page.set_default_timeout(20_000)
    expect.set_options(timeout=20_000)
    expect(estimate).to_contain_text("8 GB laptop")
    expect(estimate).to_contain_text("10 like it, 20 Mb/s")
    page.get_by_label("Volunteers you hope for").fill("25")
    expect(estimate).to_contain_text("25 like it, 100 Mb/s")
    page.locator(".preset", has_text="gpt3-175b").click()
    expect(estimate).to_contain_text("does not fit", timeout=20_000)
    check_page(page, "run-new-estimated")
    page.locator(".preset", has_text="gpt-nano").click()
    page.locator("[name=name]").fill("Terms and ties")
    page.get_by_label("People I invite by a link").check()
    page.get_by_label("Notes").fill(
        "# Why\n\nTo *see* what happens.\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    page.locator("summary", has_text="Advanced").click()
    page.locator("[name=report_every]").fill("1")
    page.locator("[name='recipe.evaluate_every']").fill("4000")
    page.locator("[name='recipe.learning_rate']").fill("3e-3")
    page.get_by_role("button", name="Create the draft").click()
    expect(page.get_by_role("heading", name="Terms and ties")).to_be_visible()
    expect(page.get_by_role("heading", name="Why")).to_be_visible()
    page.get_by_label("For whom").fill("the chess club")
    page.get_by_role("button", name="Make a link").click()
    expect(page.locator("#invitations code")).to_contain_text("/invited/")
    page.get_by_role("button", name="Launch").click()
    slug = page.url.rstrip("/").rsplit("/", 1)[1]

    enrol(site, page, "byre")
    joined = site.barnraise("byre", "join", slug, "--threads", "1")
    wait_until(lambda: site.status("byre").get("activity") == "training", "training", 90)
    page.goto("/machines/")
    page.get_by_role("link", name="byre").click()
    expect(page.get_by_text("FLOP/s")).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("Paused by you")).to_be_visible()
    wait_until(lambda: site.status("byre")["activity"] == "paused", "a pause on the machine", 30)
    stopped = site.status("byre")["step"]
    check_page(page, "machine-paused")
    page.goto("/machines/")
    assert site.status("byre")["step"] == stopped
    page.get_by_role("link", name="byre").click()
    page.get_by_role("button", name="Resume").click()
    wait_until(lambda: site.status("byre")["step"] > stopped, "training again", 30)

    page.goto(f"/runs/{slug}/")
    announced = page.locator("#checkpoints tbody tr")
    wait_until(lambda: page.reload() and announced.count() > 0, "a checkpoint", 60)
    check_page(page, "run-organised")
    page.get_by_role("button", name="Cancel run").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel run").click()
    assert joined.wait(60) == 0, site.log("join-byre")
    page.get_by_role("button", name="Archive").click()
    expect(page.get_by_text("Put away")).to_be_visible()
    page.get_by_role("button", name="Copy as a new run").click()
    expect(page.locator("[name=name]")).to_have_value("Terms and ties (copy)")


def test_an_invited_person_a_token_and_terms_are_each_a_page(site, page: Page):
    log_in(page)
    run = site.manage("create_run", "--owner", "organiser@example.org", "--name", "Pages")
    page.goto(f"/runs/{run}/")
    slug = re.search(r"barnraise join ([\w-]+)", page.content())[1]
    page.goto(f"/runs/{slug}/terms/")
    page.get_by_label("Least memory, GB").fill("lots")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("must be a number", exact=False).first).to_be_visible()
    expect(page.get_by_label("Least memory, GB")).to_have_value("lots")
    page.get_by_label("Least memory, GB").fill("8")
    page.get_by_label("People I invite by a link").check()
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Make a link").click()
    link = page.locator("#invitations code").inner_text()
    page.goto(link)
    expect(page.get_by_role("button", name="Accept")).to_be_visible()
    page.goto("/account/tokens/")
    expect(page.get_by_role("heading", name="Make one")).to_be_visible()
    page.locator("#id_name").fill("nightly")
    page.get_by_role("button", name="Make a token").click()
    expect(page.locator(".command code")).to_contain_text("brn_")
    check_page(page, "token-made")
    page.goto("/account/")
    page.get_by_role("link", name="Your certificate").click()
    expect(page.get_by_text("This certifies that")).to_be_visible()
    page.goto("/credit/?by=teams&period=week")
    expect(page.get_by_role("link", name="Teams", exact=True).first).to_have_attribute(
        "aria-current", "page"
    )
