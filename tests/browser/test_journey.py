"""A person's whole journey with real servers and real workers: from sign-up to a trained model."""

from itertools import pairwise
from subprocess import Popen

from helpers.browser.navigation import click_and_load
from helpers.browser.screenshots import (
    DIALOG,
    UPSTREAM,
    assert_still,
    check_page,
    count_shifts,
    open_page,
)
from helpers.site.live_site import Site, enrol, log_in, sign_up, wait_until
from helpers.site.pages import WIDTH_ERROR
from playwright.sync_api import Browser, Page, expect

MACHINES = ("barn", "loft")
LATE_MACHINE = "mill"
MAX_GAP = 120_000  # tokens between two points of a curve without a gap


def test_person_signs_up_and_trains_a_run_with_three_machines(site, browser: Browser, page: Page):
    """Train a run with three machines.

    Sign up; create the run with an error and correct it; launch; enrol two machines; watch the
    loss without a reload; stop and start the site; pause; let a third machine join late and ban it;
    resume and finish, and find the weights listed.
    """
    sign_up(site, page, "wilma@example.org", "Wilma")
    create_run_after_a_mistake(page)
    click_and_load(page.get_by_role("button", name="Launch"))
    expect(page.get_by_text("Waiting for one of the owner's machines")).to_be_visible()
    slug = page.url.rstrip("/").rsplit("/", 1)[1]

    run_page = page.context.new_page()
    run_page.goto(f"/runs/{slug}/")
    for machine in MACHINES:
        enrol(site, page, machine)
    joined = {
        machine: site.barnraise(machine, "join", slug, "--threads", "1") for machine in MACHINES
    }

    loaded_at = run_page.evaluate("performance.timeOrigin")
    loss = run_page.locator("[data-figure=validation]")
    expect(loss).not_to_have_text("–")
    first_loss = float(loss.inner_text())
    wait_until(lambda: float(loss.inner_text()) < first_loss - 0.2, "a lower loss on the page", 400)
    expect(run_page.locator("[data-figure=workers_alive]")).to_have_text("2")
    expect(run_page.locator("[data-figure=agree]")).to_have_text("Identical")
    expect(run_page.locator("[data-machine-table] tbody tr")).to_have_count(2)
    expect(run_page.locator("#checkpoints tbody tr")).not_to_have_count(0)
    for machine in MACHINES:
        expect(run_page.locator("[data-events] li", has_text=f"{machine} joined")).to_have_count(1)

    wait_until(
        lambda: all(site.status(m).get("updates_received", 0) for m in MACHINES),
        "updates on every machine",
        400,
    )
    stop_and_start_the_site(site, run_page)

    click_and_load(run_page.get_by_role("button", name="Pause"))
    wait_until(
        lambda: all(site.status(m)["activity"] == "paused" for m in MACHINES),
        "a pause on every machine",
        200,
    )
    steps = {m: site.status(m)["step"] for m in MACHINES}
    expect(run_page.locator("[data-events] li", has_text="paused the run")).to_have_count(1)
    enrol(site, page, LATE_MACHINE)
    late_worker = site.barnraise(LATE_MACHINE, "join", slug, "--threads", "1")
    expect(run_page.locator("[data-figure=workers_alive]")).to_have_text("3")
    wait_until(lambda: all(site.status(m)["peers"] == 2 for m in MACHINES), "the third peer")
    with open_page(browser, site) as staff_page:
        log_in(staff_page)
        ban_machine(site, staff_page, run_page, late_worker)
        assert {m: site.status(m)["step"] for m in MACHINES} == steps
        click_and_load(run_page.get_by_role("button", name="Resume"))
        wait_until(
            lambda: all(site.status(m)["step"] > steps[m] for m in MACHINES), "training again", 200
        )
        assert run_page.evaluate("performance.timeOrigin") >= loaded_at
        shifts = count_shifts(run_page)
        finish_run(staff_page)
    for machine, process in joined.items():
        assert process.wait(240) == 0, site.log(f"join-{machine}")
    assert len({(site.status(m)["vector"], site.status(m)["anchor"]) for m in joined}) == 1
    expect(run_page.get_by_text("Finished").first).to_be_visible()
    expect(run_page.locator("#model")).to_contain_text("The final weights")
    assert_still(run_page, shifts)
    check_page(run_page, "run-finished")


def create_run_after_a_mistake(page: Page) -> None:
    page.goto("/runs/new/")
    page.locator("[name=name]").fill("First frame 夜明け")
    page.locator("summary", has_text="Advanced").click()
    page.locator("[name='model.heads']").fill("5")
    # It must not end before it is paused, however long a busy machine takes until then.
    page.locator("[name='recipe.token_budget']").fill("20000000")
    page.locator("[name='report_every']").fill("1")
    page.locator("[name='recipe.learning_rate']").fill("3e-3")
    click_and_load(page.get_by_role("button", name="Create draft"))
    expect(page.get_by_text(WIDTH_ERROR).first).to_be_visible()
    expect(page.locator("[name=name]")).to_have_value("First frame 夜明け")
    expect(page.locator("[name='model.heads']")).to_have_value("5")
    check_page(page, "run-new-mistake")
    page.locator("[name='model.heads']").fill("4")
    expect(page.get_by_text(WIDTH_ERROR)).to_have_count(0)
    click_and_load(page.get_by_role("button", name="Create draft"))
    expect(page.get_by_role("heading", name="First frame")).to_be_visible()


def stop_and_start_the_site(site: Site, page: Page) -> None:
    """Kill the site: training continues, reports arrive afterwards, and the chart has no gap."""
    site.processes.kill("site")
    expect(page.locator("[data-connection]")).to_have_attribute("data-connection", "reconnecting")
    before = {m: site.status(m)["updates_received"] for m in MACHINES}

    def every_machine_received_updates() -> bool:
        return all(site.status(m)["updates_received"] > n + 1 for m, n in before.items())

    wait_until(every_machine_received_updates, "updates without a site", 400)
    tokens_without_site = max(site.status(m)["ledger_tokens"] for m in MACHINES)
    # Who reads by keys gets the newest points, wherever the page is scrolled.
    page.locator("[data-loss-chart] [data-plot]").focus()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    site.start_web()
    expect(page.locator("[data-connection]")).to_have_attribute("data-connection", "live")
    wait_until(
        lambda: max(charted_tokens(page)) > tokens_without_site,
        "the delayed reports in the chart of the open page",
        120,
    )
    run_id = page.locator("[data-live-run]").get_attribute("data-live-run")
    snapshot = page.request.get(f"/live/{run_id}/").json()
    for curve in (charted_tokens(page), [tokens for tokens, _ in snapshot["train"]]):
        gap = max(later - earlier for earlier, later in pairwise(curve))
        assert gap < MAX_GAP, f"the training curve has a gap of {gap:,.0f} tokens"


def charted_tokens(page: Page) -> list[float]:
    """Read the chart's points in tokens by moving along it with the arrow keys."""
    plot = page.locator("[data-loss-chart] [data-plot]")
    plot.press("Home")
    tokens = []
    for _ in range(70):
        position, _, _ = plot.get_attribute("aria-valuetext").partition(":")
        tokens.append(parse_number(position.split(" ", 1)[1]))
        if plot.get_attribute("aria-valuenow") == plot.get_attribute("aria-valuemax"):
            break
        plot.press("ArrowRight")
    plot.press("Escape")
    return tokens


def parse_number(text: str) -> float:
    """Convert 1.23 M to 1,230,000."""
    value, _, unit = text.partition(" ")
    return float(value) * {"": 1, "K": 1e3, "M": 1e6}[unit]


def ban_machine(site: Site, staff_page: Page, run_page: Page, worker: Popen) -> None:
    """Ban the machine `mill`: the site refuses it, and so do its peers."""
    staff_page.goto("/admin/accounts/machine/?q=mill")
    click_and_load(staff_page.get_by_role("link", name="mill", exact=True))
    staff_page.get_by_role("link", name="Ban this machine").click()
    dialog = staff_page.locator("#dialog")
    dialog.locator("[name=reason]").fill("It sends nonsense.")
    check_page(staff_page, "admin-machine-ban", not_ours=DIALOG)
    click_and_load(dialog.get_by_role("button", name="Ban this machine"))
    expect(staff_page.get_by_text("Its peers are informed")).to_be_visible()
    assert worker.wait(120) != 0, "a banned machine stops and prints why"
    assert "revoked" in site.log("join-mill")
    wait_until(
        lambda: all(site.status(m)["peers"] == 1 for m in MACHINES), "peers that refuse it", 120
    )
    expect(run_page.locator("[data-figure=workers_alive]")).to_have_text("2")
    expect(run_page.locator("[data-events] li", has_text="mill was revoked")).to_have_count(1)
    slug = run_page.url.rstrip("/").rsplit("/", 1)[1]
    second_join = site.barnraise("mill", "join", slug, "--threads", "1")
    assert second_join.wait(120) != 0, "a banned machine cannot join again"


def finish_run(staff_page: Page) -> None:
    staff_page.goto("/admin/runs/run/")
    row = staff_page.locator("tr", has_text="First frame")
    row.locator("input[type=checkbox]").first.check()
    staff_page.locator("select[name=action]").select_option("finish_all")
    check_page(staff_page, "admin-runs-chosen", not_ours=UPSTREAM)
    click_and_load(staff_page.get_by_role("button", name="Run").first)
