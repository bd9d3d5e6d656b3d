"""One person's whole way, with real servers and real workers: from a login to a model that three machines trained."""

import re
from itertools import pairwise

from live_site import log_in, shoot, until
from playwright.sync_api import Page, expect

MACHINES = ("barn", "loft", "mill")


def test_a_run_is_raised_in_the_browser(site, page: Page):
    """Create it with a mistake, mend it, launch; enrol three machines; watch the loss come in without a reload; lose
    the site and get it back; pause and resume; finish."""
    log_in(page)
    create_with_a_mistake_and_mend_it(page)
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_text("Waiting for one of the owner's machines")).to_be_visible()
    slug = page.url.rstrip("/").rsplit("/", 1)[1]

    run_page = page.context.new_page()
    run_page.goto(f"/runs/{slug}/")
    for machine in MACHINES:
        enrol(site, page, machine)
    joined = {machine: site.barnraise(machine, "join", slug, "--threads", "1") for machine in MACHINES}

    loaded = run_page.evaluate("performance.timeOrigin")
    figure = run_page.locator("[data-figure=validation]")
    expect(figure).not_to_have_text("–", timeout=60_000)
    first = float(figure.inner_text())
    until(lambda: float(figure.inner_text()) < first - 0.2, "a falling loss on the page", 90)
    expect(run_page.locator("[data-figure=alive]")).to_have_text("3", timeout=60_000)
    assert run_page.locator("tbody tr").count() == 3
    assert run_page.locator(".u-over").count() > 0, "the chart is drawn"

    until(lambda: all(site.status(m).get("updates_received", 0) for m in MACHINES), "updates on every machine")
    lose_the_site_and_get_it_back(site, run_page)
    shoot(run_page, "run-training")

    run_page.get_by_role("button", name="Pause").click()
    until(lambda: all(site.status(m)["activity"] == "paused" for m in MACHINES), "a pause on every machine", 20)
    run_page.get_by_role("button", name="Resume").click()
    until(lambda: all(site.status(m)["activity"] == "training" for m in MACHINES), "training again", 20)
    assert run_page.evaluate("performance.timeOrigin") >= loaded

    finish_in_the_admin(page, slug)
    for machine, process in joined.items():
        assert process.wait(60) == 0, site.log(f"join-{machine}")
    assert len({(site.status(m)["vector"], site.status(m)["anchor"]) for m in MACHINES}) == 1
    expect(run_page.get_by_text("Finished").first).to_be_visible(timeout=20_000)
    shoot(run_page, "run-finished")


def create_with_a_mistake_and_mend_it(page: Page) -> None:
    page.goto("/runs/new/")
    page.locator("[name=name]").fill("First frame")
    page.locator("summary", has_text="Advanced").click()
    page.locator("[name='model.heads']").fill("5")
    page.locator("[name='report_every']").fill("1")
    page.locator("[name='recipe.learning_rate']").fill("3e-3")
    page.get_by_role("button", name="Create the draft").click()
    expect(page.get_by_text("must be divisible by the heads").first).to_be_visible()
    expect(page.locator("[name=name]")).to_have_value("First frame")
    expect(page.locator("[name='model.heads']")).to_have_value("5")
    shoot(page, "new-run-mistake")
    page.locator("[name='model.heads']").fill("4")
    page.get_by_role("button", name="Create the draft").click()
    expect(page.get_by_role("heading", name="First frame")).to_be_visible()


def enrol(site, page: Page, machine: str) -> None:
    """`barnraise login` prints an address; its owner follows it and approves."""
    login = site.barnraise(machine, "login", site.url, "--name", machine)
    where = re.compile(r"http://\S+/machines/enrol/\S+/")
    until(lambda: where.search(site.log(f"login-{machine}")), "a code to approve")
    page.goto(where.search(site.log(f"login-{machine}"))[0])
    expect(page.get_by_text(machine).first).to_be_visible()
    page.get_by_role("button", name="Approve").click()
    assert login.wait(30) == 0, site.log(f"login-{machine}")


def lose_the_site_and_get_it_back(site, page: Page) -> None:
    """Training goes on without it; what was measured meanwhile arrives afterwards, and the chart has no hole."""
    site.family.kill("site")
    expect(page.locator("[data-link]")).to_have_attribute("data-link", "reconnecting", timeout=15_000)
    before = {m: site.status(m)["updates_received"] for m in MACHINES}
    until(lambda: all(site.status(m)["updates_received"] > n + 1 for m, n in before.items()), "updates without a site")
    gone = max(site.status(m)["ledger_tokens"] for m in MACHINES)
    site.start_web()
    expect(page.locator("[data-link]")).to_have_attribute("data-link", "live", timeout=40_000)
    run = page.locator("[data-live-run]").get_attribute("data-live-run")

    def told() -> list[int]:
        snapshot = page.request.get(f"/live/{run}/").json()
        return [tokens for tokens, _ in snapshot["train"]]

    until(lambda: max(told()) > gone, "reports that waited")
    seen = told()
    widest = max(b - a for a, b in pairwise(seen))
    assert widest < 120_000, f"the training curve has a hole of {widest} tokens"


def finish_in_the_admin(page: Page, slug: str) -> None:
    page.goto("/admin/runs/run/")
    page.locator("tr", has_text="First frame").locator("input[type=checkbox]").first.check()
    page.locator("select[name=action]").select_option("finish_all")
    shoot(page, "admin-runs")
    page.get_by_role("button", name="Run").first.click()
