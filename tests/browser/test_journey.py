"""A person's whole journey with real servers and real workers: from sign-up to a trained model."""

from itertools import pairwise

from helpers.live_site import Site, enrol, log_in, sign_up, wait_until
from helpers.navigation import click_and_load
from helpers.screenshots import DIALOG, UPSTREAM, check_page, open_page
from playwright.sync_api import Browser, Page, expect

MACHINES = ("barn", "loft", "mill")
WIDEST = 120_000  # tokens between two points of the curve: more is a hole
LONG = 240_000  # ms: the machine that tests run on may have others to serve


def test_person_signs_up_and_trains_a_run_with_three_machines(site, browser: Browser, page: Page):
    """Train a run with three machines.

    Sign up; create the run with an error and correct it; launch; enrol three machines; watch the loss
    without a reload; lose the site and get it back; pause and resume; ban one machine; finish, and find
    the weights listed.
    """
    expect.set_options(timeout=LONG)
    sign_up(site, page, "wilma@example.org", "Wilma")
    create_with_a_mistake_and_mend_it(page)
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

    loaded = run_page.evaluate("performance.timeOrigin")
    figure = run_page.locator("[data-figure=validation]")
    expect(figure).not_to_have_text("–")
    first = float(figure.inner_text())
    wait_until(lambda: float(figure.inner_text()) < first - 0.2, "a falling loss on the page", 400)
    expect(run_page.locator("[data-figure=alive]")).to_have_text("3")
    expect(run_page.locator("[data-figure=agree]")).to_have_text("Identical")
    assert run_page.locator("[data-workers] tbody tr").count() == 3
    for machine in MACHINES:
        expect(run_page.locator("[data-events] li", has_text=f"{machine} joined")).to_have_count(1)

    wait_until(
        lambda: all(site.status(m).get("updates_received", 0) for m in MACHINES),
        "updates on every machine",
        400,
    )
    lose_the_site_and_get_it_back(site, run_page)
    check_page(run_page, "run-training")

    click_and_load(run_page.get_by_role("button", name="Pause"))
    wait_until(
        lambda: all(site.status(m)["activity"] == "paused" for m in MACHINES),
        "a pause on every machine",
        200,
    )
    steps = {m: site.status(m)["step"] for m in MACHINES}
    expect(run_page.locator("[data-events] li", has_text="paused the run")).to_have_count(1)
    assert {m: site.status(m)["step"] for m in MACHINES} == steps
    click_and_load(run_page.get_by_role("button", name="Resume"))
    wait_until(
        lambda: all(site.status(m)["step"] > steps[m] for m in MACHINES), "training again", 200
    )
    assert run_page.evaluate("performance.timeOrigin") >= loaded

    with open_page(browser, site) as staff:
        log_in(staff)
        ban(site, staff, run_page, joined.pop("mill"))
        finish(staff, slug)
    for machine, process in joined.items():
        assert process.wait(240) == 0, site.log(f"join-{machine}")
    assert len({(site.status(m)["vector"], site.status(m)["anchor"]) for m in joined}) == 1
    expect(run_page.get_by_text("Finished").first).to_be_visible()
    wait_until(
        lambda: run_page.reload() and run_page.locator("#checkpoints tbody tr").count(),
        "a checkpoint",
        200,
    )
    check_page(run_page, "run-finished")


def create_with_a_mistake_and_mend_it(page: Page) -> None:
    page.goto("/runs/new/")
    page.locator("[name=name]").fill("First frame")
    page.locator("summary", has_text="Advanced").click()
    page.locator("[name='model.heads']").fill("5")
    page.locator("[name='report_every']").fill("1")
    page.locator("[name='recipe.learning_rate']").fill("3e-3")
    click_and_load(page.get_by_role("button", name="Create draft"))
    expect(page.get_by_text("must be divisible by the heads").first).to_be_visible()
    expect(page.locator("[name=name]")).to_have_value("First frame")
    expect(page.locator("[name='model.heads']")).to_have_value("5")
    check_page(page, "run-new-mistake")
    page.locator("[name='model.heads']").fill("4")
    click_and_load(page.get_by_role("button", name="Create draft"))
    expect(page.get_by_role("heading", name="First frame")).to_be_visible()


def lose_the_site_and_get_it_back(site: Site, page: Page) -> None:
    """Kill the site: training continues, reports arrive afterwards, and the chart has no gap."""
    site.family.kill("site")
    expect(page.locator("[data-link]")).to_have_attribute("data-link", "reconnecting")
    before = {m: site.status(m)["updates_received"] for m in MACHINES}

    def trains_on() -> bool:
        return all(site.status(m)["updates_received"] > n + 1 for m, n in before.items())

    wait_until(trains_on, "updates without a site", 400)
    gone = max(site.status(m)["ledger_tokens"] for m in MACHINES)
    site.start_web()
    expect(page.locator("[data-link]")).to_have_attribute("data-link", "live")
    wait_until(
        lambda: max(shown(page)) > gone, "reports that waited, in the chart of the open page", 120
    )
    told = page.request.get(
        f"/live/{page.locator('[data-live-run]').get_attribute('data-live-run')}/"
    ).json()
    for seen in (shown(page), [tokens for tokens, _ in told["train"]]):
        widest = max(b - a for a, b in pairwise(seen))
        assert widest < WIDEST, f"the training curve has a hole of {widest:,.0f} tokens"


def shown(page: Page) -> list[float]:
    """Read the chart's points in tokens by moving along it with the arrow keys."""
    plot = page.locator("[data-loss-chart] [data-plot]")
    plot.press("Home")
    places = []
    for _ in range(70):
        places.append(
            number(plot.get_attribute("aria-valuetext").split(" ", 1)[1].partition(":")[0])
        )
        if plot.get_attribute("aria-valuenow") == plot.get_attribute("aria-valuemax"):
            break
        plot.press("ArrowRight")
    plot.press("Escape")
    return places


def number(text: str) -> float:
    """Convert 1.23 M to 1,230,000."""
    value, _, unit = text.partition(" ")
    return float(value) * {"": 1, "K": 1e3, "M": 1e6}[unit]


def ban(site: Site, staff: Page, run_page: Page, worker) -> None:
    """Ban a machine: the site refuses it, and so do its peers."""
    staff.goto("/admin/accounts/machine/?q=mill")
    click_and_load(staff.get_by_role("link", name="mill", exact=True))
    staff.get_by_role("link", name="Ban this machine").click()
    dialog = staff.locator("#dialog")
    dialog.locator("[name=reason]").fill("It sends nonsense.")
    check_page(staff, "admin-machine-ban", not_ours=DIALOG)
    dialog.get_by_role("button", name="Ban this machine").click()
    expect(staff.get_by_text("Its peers are informed")).to_be_visible()
    assert worker.wait(120) != 0, "a banned machine stops, and says why"
    assert "revoked" in site.log("join-mill")
    wait_until(
        lambda: all(site.status(m)["peers"] == 1 for m in ("barn", "loft")),
        "peers that refuse it",
        120,
    )
    expect(run_page.locator("[data-figure=alive]")).to_have_text("2")
    expect(run_page.locator("[data-events] li", has_text="mill was revoked")).to_have_count(1)
    again = site.barnraise(
        "mill", "join", run_page.url.rstrip("/").rsplit("/", 1)[1], "--threads", "1"
    )
    assert again.wait(120) != 0, "and it does not come back"


def finish(staff: Page, slug: str) -> None:
    staff.goto("/admin/runs/run/")
    staff.locator("tr", has_text="First frame").locator("input[type=checkbox]").first.check()
    staff.locator("select[name=action]").select_option("finish_all")
    check_page(staff, "admin-runs-chosen", not_ours=UPSTREAM)
    click_and_load(staff.get_by_role("button", name="Run").first)
