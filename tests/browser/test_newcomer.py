"""A newcomer organises a run, by clicks and commands that the pages and the terminal name."""

import re
import shlex
import time
from pathlib import Path

import pytest
from helpers.browser.navigation import click_and_load
from helpers.browser.screenshots import FIND_SPARE_ROOM, WRONG_NUMBER, open_page
from helpers.site.live_site import CODE, PASSWORD, Site, wait_until
from playwright.sync_api import Browser, Page, expect

MAX_CLICKS = 4
# Asked for is half a minute on an idle computer (docs/benchmarks/frontend.md); tests share theirs.
MAX_SECONDS = 240.0
COUNT_CLICKS = """
addEventListener("click", (event) => {
  if (!event.isTrusted) return;
  const count = Number(localStorage.getItem("clicks") ?? 0);
  localStorage.setItem("clicks", String(count + 1));
}, { capture: true });
"""
ENROLMENT = re.compile(r"http://\S+/enrol/\S+/")
CONFIRMATION = re.compile(r"http://\S+/machines/\S+/#confirm")
NEXT_COMMAND = re.compile(r"Next, on this machine: (barnraise join \S+)")


def sign_up_as_newcomer(site: Site, page: Page, email: str) -> None:
    """Sign up, as the form of a new run asks a visitor to."""
    page.context.add_init_script(COUNT_CLICKS)
    page.goto("/accounts/signup/?next=/runs/new/")
    page.get_by_label("Email").fill(email)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_label("Name").fill("Nora")
    click_and_load(page.get_by_role("button", name="Create account"))
    page.get_by_label("Code").fill(CODE.search(site.newest_email(email))[1])
    click_and_load(page.get_by_role("button", name="Confirm"))
    expect(page).to_have_url(re.compile("/runs/new/$"))


def only_command(page: Page) -> list[str]:
    """Return the arguments of the one command in the owner's checklist."""
    command = page.locator(".checklist .command code")
    expect(command).to_have_count(1)
    name, *arguments = shlex.split(command.inner_text())
    assert name == "barnraise"
    return arguments


def find_in_log(site: Site, log: str, pattern: re.Pattern[str]) -> re.Match[str]:
    return wait_until(lambda: pattern.search(site.log(log)), f"{pattern.pattern} in {log}", 120)


def test_own_text_trains_after_two_commands_and_a_late_confirmation(site, browser, tmp_path):
    """Approve the machine for training only: `prepare` waits for the click that the page offers."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = [f"The {n}th beam of the barn rests on the {n + 1}th.\n" for n in range(600)]
    (corpus / "beams.txt").write_text("".join(lines))
    with open_page(browser, site) as page:
        sign_up_as_newcomer(site, page, "nils@example.org")
        page.locator("[name=name]").fill("Own words")
        page.get_by_label("Files on my own machine").check()
        page.locator("summary", has_text="Advanced").click()
        page.locator("[name=report_every]").fill("1")
        click_and_load(page.get_by_role("button", name="Create and launch"))

        command = [argument.replace("FOLDER", str(corpus)) for argument in only_command(page)]
        prepared = site.barnraise("desk", *command, "--yes")
        address = find_in_log(site, "prepare-desk", ENROLMENT)[0]
        tab = page.context.new_page()
        tab.goto(address)
        click_and_load(tab.get_by_role("button", name="Approve for training only"))
        tab.close()

        find_in_log(site, "prepare-desk", CONFIRMATION)
        assert "beams.txt" not in site.log("prepare-desk"), "it asks before it reads"
        expect(page.locator("[data-waiting-text]")).to_contain_text("the owner to confirm")
        click_and_load(page.locator(".checklist").get_by_role("button", name="Confirm"))
        expect(page.get_by_role("heading", name="Own words")).to_be_visible()
        assert prepared.wait(120) == 0, site.log("prepare-desk")

        join = find_in_log(site, "prepare-desk", NEXT_COMMAND)[1]
        joined = site.barnraise("desk", *shlex.split(join)[1:], "--threads", "1")
        expect(page.locator("[data-figure=train]")).not_to_have_text("–")
        assert "not launched" not in site.log("join-desk")
        joined.terminate()
        assert joined.wait(120) == 0, site.log("join-desk")
        said = site.log("prepare-desk") + site.log("join-desk")
        assert not re.search(WRONG_NUMBER, said), re.search(WRONG_NUMBER, said)


@pytest.mark.slow  # the other test of this module has the same steps and one more
def test_default_text_trains_after_four_clicks_and_one_command(site, browser: Browser):
    with open_page(browser, site) as page:
        sign_up_as_newcomer(site, page, "nora@example.org")
        page.locator("[name=name]").fill("First steps")
        click_and_load(page.get_by_role("button", name="Create and launch"))

        started = time.monotonic()
        joined = site.barnraise("attic", *only_command(page), "--threads", "1")
        # In a terminal of a person, join opens this page by itself.
        tab = page.context.new_page()
        tab.goto(find_in_log(site, "join-attic", ENROLMENT)[0])
        click_and_load(tab.get_by_role("button", name="Approve and confirm"))
        loss = page.locator("[data-figure=train]")
        expect(loss).not_to_have_text("–", timeout=MAX_SECONDS * 1000)
        seconds = time.monotonic() - started
        page.locator("[data-loss-chart]").scroll_into_view_if_needed()  # it is drawn in view
        expect(page.locator("[data-loss-chart] .uplot canvas")).to_be_visible()
        spare = page.evaluate(FIND_SPARE_ROOM)
        assert not spare, f"the page that has followed the start keeps room in {spare}"
        clicks = int(page.evaluate("localStorage.getItem('clicks')"))
        joined.terminate()
        assert joined.wait(120) == 0, site.log("join-attic")
    record_figures(clicks, seconds)
    assert clicks <= MAX_CLICKS
    assert seconds <= MAX_SECONDS


@pytest.mark.slow
def test_join_of_an_enrolled_machine_names_the_page_that_confirms_it(site, browser: Browser):
    """Enrol without a run, for training only, then join one's own: the terminal waits for it."""
    with open_page(browser, site) as page:
        sign_up_as_newcomer(site, page, "nele@example.org")
        login = site.barnraise("porch", "login", site.url)
        page.goto(find_in_log(site, "login-porch", ENROLMENT)[0])
        click_and_load(page.get_by_role("button", name="Approve"))
        assert login.wait(120) == 0
        page.goto("/runs/new/")
        page.locator("[name=name]").fill("Second try")
        click_and_load(page.get_by_role("button", name="Create and launch"))
        expect(page.locator(".checklist [aria-current=step] b")).to_contain_text("Confirm ")
        command = page.locator(".checklist .command code").inner_text()
        joined = site.barnraise("porch", *shlex.split(command)[1:], "--threads", "1")
        page.goto(find_in_log(site, "join-porch", CONFIRMATION)[0])
        click_and_load(page.get_by_role("button", name=re.compile("^Confirm ")))
        wait_until(lambda: site.status("porch").get("activity") == "training", "training")
        assert "not launched" not in site.log("join-porch")
        joined.terminate()
        assert joined.wait(120) == 0, site.log("join-porch")


def record_figures(clicks: int, seconds: float) -> None:
    """Print the figures, which pytest shows with -s."""
    load = Path("/proc/loadavg")
    busy = load.read_text().split()[0] if load.exists() else "unknown"
    print(f"{clicks} clicks, 1 command, first loss {seconds:.1f} s after join")
    print(f"load average {busy}")
