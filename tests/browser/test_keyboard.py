"""The same way on a phone's width, and without ever touching a pointer: only keys are pressed."""

import re

from helpers.live_site import CODE, PASSWORD, request_enrolment, wait_until
from helpers.screenshots import open_page
from playwright.sync_api import Browser, Locator, Page, expect

LONG = 240_000  # ms: the machine that tests run on may have others to serve
EMAIL = "karin@example.org"


class Keys:
    """A person who has a keyboard."""

    def __init__(self, page: Page):
        self.page = page

    def to(self, target: Locator, most: int = 150) -> None:
        """Tab, until the focus is there; where it can be seen."""
        expect(target).to_be_visible()
        for _ in range(most):
            if target.evaluate("it => it === document.activeElement"):
                seen = "it => { const box = it.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight }"
                assert target.evaluate(seen), f"{target} has the focus, out of sight"
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{target} is not reached by {most} tabs")

    def press(self, target: Locator, key: str = "Enter") -> None:
        self.to(target)
        self.page.keyboard.press(key)

    def write(self, target: Locator, text: str) -> None:
        self.to(target)
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.type(text)

    def button(self, name: str) -> None:
        self.press(self.page.get_by_role("button", name=name, exact=True))


def test_the_same_way_at_360_pixels_and_by_keyboard_alone(site, browser: Browser):
    expect.set_options(timeout=LONG)
    with open_page(browser, site, width=360) as page:
        keys = Keys(page)
        sign_up(site, page, keys)
        slug = create(page, keys)
        joined = lend_a_machine(site, page, keys, slug)
        expect(page.locator("[data-figure=train]")).not_to_have_text("–")
        read_the_chart(page, keys)
        expect(page.locator("[data-events] li", has_text="shed joined")).to_have_count(1)

        keys.button("Pause")
        wait_until(
            lambda: site.status("shed")["activity"] == "paused", "a pause on the machine", 200
        )
        step = site.status("shed")["step"]
        expect(page.locator("[data-status-chip]")).to_have_text("Paused")
        keys.button("Resume")
        wait_until(lambda: site.status("shed")["step"] > step, "training again", 200)
        end = (
            f"from coordinator.runs.models import Run; assert Run.objects.find('{slug}').finish()"
        )
        site.manage("shell", "-v", "0", "-c", end)
        assert joined.wait(240) == 0, site.log("join-shed")
        expect(page.locator("[data-status-chip]")).to_have_text("Finished")
        wait_until(
            lambda: page.reload() and page.locator("#checkpoints tbody tr").count(),
            "a checkpoint",
            200,
        )
        fits(page)


def fits(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, page.url


def sign_up(site, page: Page, keys: Keys) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    keys.press(page.get_by_role("link", name="Lend a hand"))
    keys.write(page.get_by_label("Email"), EMAIL)
    keys.write(page.get_by_label("Password"), PASSWORD)
    keys.write(page.get_by_label("Name"), "Karin")
    fits(page)
    page.keyboard.press("Enter")
    keys.write(page.get_by_label("Code"), CODE.search(site.letter(EMAIL))[1])
    page.keyboard.press("Enter")
    expect(page.get_by_text("Karin", exact=True).first).to_be_visible()


def create(page: Page, keys: Keys) -> str:
    """With a mistake, mended; launched."""
    keys.press(page.get_by_role("link", name="New run"))
    keys.write(page.locator("[name=name]"), "By keys")
    keys.press(page.locator("summary", has_text="Advanced"))
    keys.write(page.locator("[name='model.heads']"), "5")
    keys.write(page.locator("[name='report_every']"), "1")
    keys.button("Create the draft")
    expect(page.get_by_text("must be divisible by the heads").first).to_be_visible()
    fits(page)
    keys.write(page.locator("[name='model.heads']"), "4")
    keys.button("Create the draft")
    expect(page.get_by_role("heading", name="By keys")).to_be_visible()
    keys.button("Launch")
    expect(page.get_by_text("Waiting for one of the owner's machines")).to_be_visible()
    fits(page)
    return page.url.rstrip("/").rsplit("/", 1)[1]


def lend_a_machine(site, page: Page, keys: Keys, slug: str):
    login, where = request_enrolment(site, "shed")
    page.goto(where)
    fits(page)
    keys.button("Approve")
    assert login.wait(120) == 0, site.log("login-shed")
    joined = site.barnraise("shed", "join", slug, "--threads", "1")
    page.goto(f"/runs/{slug}/")
    return joined


def read_the_chart(page: Page, keys: Keys) -> None:
    """Arrow keys go along it, and what they lead to is said; what it is drawn over is kept for the next visit."""
    plot, over = page.locator("[data-loss-chart] [data-plot]"), page.locator("[data-choice=across]")
    expect(plot).to_have_attribute("aria-valuemax", re.compile(r"[1-9]"))  # two points at least
    keys.press(plot, "Home")
    expect(plot).to_have_attribute("aria-valuenow", "0")
    expect(plot).to_have_attribute(
        "aria-valuetext", re.compile(r"^Tokens .+(training|validation) \d")
    )
    page.keyboard.press("End")
    assert plot.get_attribute("aria-valuenow") != "0"
    page.reload()
    keys.to(over)
    page.keyboard.type("time")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"^Time \d\d:\d\d: training"))
    keys.press(page.get_by_label("Training, each machine"), "Space")
    expect(page.locator("[data-machine-lines]")).to_contain_text("shed")
    page.reload()
    expect(over).to_have_value("time")
    expect(page.get_by_label("Training, each machine")).to_be_checked()
    expect(page.locator("[data-machine-lines]")).to_contain_text("shed")
    fits(page)
