"""A person trains a run at the width of a phone and by keyboard alone."""

import re
from subprocess import Popen

import pytest
from helpers.browser.navigation import new_page_loaded
from helpers.browser.screenshots import open_page
from helpers.site.live_site import CODE, PASSWORD, request_enrolment, wait_until
from helpers.site.pages import WIDTH_ERROR
from playwright.sync_api import Browser, Locator, Page, expect

EMAIL = "karin@example.org"
FINISH_RUN = "from coordinator.runs.models import Run; assert Run.objects.find({slug!r}).finish()"
HAS_FOCUS = "element => element === document.activeElement"
IS_IN_SIGHT = """element => {
  const box = element.getBoundingClientRect();
  return box.bottom > 0 && box.top < innerHeight;
}"""


class Keys:
    """A person's keyboard."""

    def __init__(self, page: Page):
        self.page = page

    def focus(self, target: Locator, max_presses: int = 150) -> None:
        """Press Tab until the target has the focus, and check that it is in sight."""
        expect(target).to_be_visible()
        for _ in range(max_presses):
            if target.evaluate(HAS_FOCUS):
                assert target.evaluate(IS_IN_SIGHT), f"{target} has the focus, out of sight"
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{target} is not reached by pressing Tab {max_presses} times")

    def press(self, target: Locator, key: str = "Enter") -> None:
        self.focus(target)
        self.page.keyboard.press(key)

    def write(self, target: Locator, text: str) -> None:
        self.focus(target)
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.type(text)

    def follow(self, link: str) -> None:
        """Press Enter on a link and wait for its page."""
        with new_page_loaded(self.page):
            self.press(self.page.get_by_role("link", name=link))

    def submit(self, button: str) -> None:
        """Press Enter on a button that sends a form and wait for the next page."""
        with new_page_loaded(self.page):
            self.press(self.page.get_by_role("button", name=button, exact=True))

    def submit_field(self) -> None:
        """Send the form by Enter in its field and wait for the next page."""
        with new_page_loaded(self.page):
            self.page.keyboard.press("Enter")


@pytest.mark.slow
def test_person_trains_a_run_at_360_pixels_by_keyboard_alone(site, browser: Browser):
    with open_page(browser, site, width=360) as page:
        keys = Keys(page)
        sign_up(site, page, keys)
        slug = create_run(page, keys)
        joined = join_with_a_machine(site, page, keys, slug)
        expect(page.locator("[data-figure=train]")).not_to_have_text("–")
        read_the_chart(page, keys)
        expect(page.locator("[data-events] li", has_text="shed joined")).to_have_count(1)

        keys.submit("Pause")
        wait_until(lambda: site.status("shed")["activity"] == "paused", "a pause on the machine")
        step = site.status("shed")["step"]
        expect(page.locator("[data-status-chip]")).to_have_text("Paused")
        keys.submit("Resume")
        wait_until(lambda: site.status("shed")["step"] > step, "training again")
        site.manage("shell", "-v", "0", "-c", FINISH_RUN.format(slug=slug))
        assert joined.wait(600) == 0, site.log("join-shed")
        expect(page.locator("[data-status-chip]")).to_have_text("Finished")
        wait_until(
            lambda: page.reload() and page.locator("#checkpoints tbody tr").count(),
            "a checkpoint",
            200,
        )
        assert_fits_the_phone(page)


def assert_fits_the_phone(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, page.url


def sign_up(site, page: Page, keys: Keys) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#main$"))
    keys.follow("Lend a hand")
    keys.write(page.get_by_label("Email"), EMAIL)
    keys.write(page.get_by_label("Password"), PASSWORD)
    keys.write(page.get_by_label("Name"), "Karin")
    assert_fits_the_phone(page)
    keys.submit_field()
    keys.write(page.get_by_label("Code"), CODE.search(site.newest_email(EMAIL))[1])
    keys.submit_field()
    expect(page.get_by_text("Karin", exact=True).first).to_be_visible()


def create_run(page: Page, keys: Keys) -> str:
    """Create a run with an error, correct it, and launch it."""
    keys.follow("New run")
    keys.write(page.locator("[name=name]"), "By keys")
    keys.press(page.locator("summary", has_text="Advanced"))
    keys.write(page.locator("[name='model.layers']"), "2")
    keys.write(page.locator("[name='model.width']"), "64")  # it trains among all other tests
    keys.write(page.locator("[name='model.heads']"), "5")
    keys.write(page.locator("[name='report_every']"), "1")
    keys.submit("Create draft")
    expect(page.get_by_text(WIDTH_ERROR).first).to_be_visible()
    assert_fits_the_phone(page)
    expect(page.locator("[aria-invalid]")).to_have_count(1)
    keys.write(page.locator("[name='model.heads']"), "4")
    expect(page.get_by_text(WIDTH_ERROR)).to_have_count(0)
    expect(page.locator("[aria-invalid]")).to_have_count(0)
    keys.submit("Create draft")
    expect(page.get_by_role("heading", name="By keys")).to_be_visible()
    keys.submit("Launch")
    expect(page.get_by_text("Waiting for one of the owner's machines")).to_be_visible()
    assert_fits_the_phone(page)
    return page.url.rstrip("/").rsplit("/", 1)[1]


def join_with_a_machine(site, page: Page, keys: Keys, slug: str) -> Popen:
    """Enrol a machine and start training on it; return its process."""
    login, address = request_enrolment(site, "shed")
    page.goto(address)
    assert_fits_the_phone(page)
    keys.submit("Approve and confirm")  # it prepares the text of Karin's own run
    assert login.wait(600) == 0, site.log("login-shed")
    joined = site.barnraise("shed", "join", slug, "--threads", "1")
    page.goto(f"/runs/{slug}/")
    # It prepares the text first, and lets all other programs go before.
    wait_until(lambda: site.status("shed").get("step", 0) > 0, "the first step")
    return joined


def read_the_chart(page: Page, keys: Keys) -> None:
    """Move along the chart by arrow keys; its x axis is remembered."""
    plot = page.locator("[data-loss-chart] [data-plot]")
    x_axis = page.locator("[data-preference=xAxis]")
    keys.focus(plot)  # below the window's end it is not drawn again
    expect(plot).to_have_attribute("aria-valuemax", re.compile(r"[1-9]"))  # at least two points
    keys.press(plot, "Home")
    expect(plot).to_have_attribute("aria-valuenow", "0")
    expect(plot).to_have_attribute(
        "aria-valuetext", re.compile(r"^Tokens .+(training|validation) \d")
    )
    page.keyboard.press("End")
    assert plot.get_attribute("aria-valuenow") != "0"
    page.reload()
    keys.focus(x_axis)
    page.keyboard.type("time")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"^Time \d\d:\d\d: training"))
    keys.press(page.get_by_label("Training, each machine"), "Space")
    expect(page.locator("[data-loss-chart] [data-machine-legend]")).to_contain_text("shed")
    page.reload()
    expect(x_axis).to_have_value("time")
    expect(page.get_by_label("Training, each machine")).to_be_checked()
    keys.focus(plot)
    expect(page.locator("[data-loss-chart] [data-machine-legend]")).to_contain_text("shed")
    assert_fits_the_phone(page)
