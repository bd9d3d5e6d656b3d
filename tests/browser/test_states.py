"""A run's page shows its state and no other, and each figure is the same wherever it stands."""

import re

import pytest
from helpers.browser.screenshots import FIND_CLIPPED, assert_still, open_page
from helpers.site.live_site import EMAIL, log_in
from helpers.worker.command_line import invoke
from playwright.sync_api import Page, expect

# Runs → the words of their heads, and whether figures change; of the draft its owner alone.
STATES = {
    "draft": ("A draft: it starts once it is launched", False),
    "empty_run": ("Waiting for machines", True),
    "run": ("3 machines train", True),
    "paused_run": ("Paused. 1 machine waits with all the progress", True),
    "cancelled_run": ("Cancelled before it trained", False),
    "finished_run": ("Finished after 720 K tokens. Get the model", False),
}
UNKNOWN = re.compile(r"^\s*(–|Nobody yet)?\s*$")
# Seen by nobody who looks at a state that has them: texts in the place of a measurement.
EMPTY_TEXTS = ("No measurements yet", "The first losses appear", "No machine has joined")
CREATE_TOKEN = f"""
from coordinator.accounts.models import User
from coordinator.tokens.models import Token
print(Token.create(User.objects.get(email={EMAIL!r}), "states", ["runs:read"], 1)[1])
"""


@pytest.fixture(scope="module")
def names(site) -> dict[str, str]:
    return site.create_examples()


def visible_tiles(page: Page) -> dict[str, str]:
    """Return what the tiles of the page's head show, by their names."""
    tiles = page.locator("[data-tiles]:not([hidden]) [data-tile]:not([hidden])")
    return {
        tile.get_attribute("data-tile"): tile.locator("dd").inner_text() for tile in tiles.all()
    }


def test_page_of_each_state_has_only_what_the_state_has(names, site, browser):
    with open_page(browser, site) as page:
        log_in(page)
        for name, (words, is_live) in STATES.items():
            page.goto(f"/runs/{names[name]}/")
            expect(page.locator("[data-connection]")).to_have_attribute("data-connection", "live")
            assert words in page.locator(".run-notices").inner_text()
            unknown = [tile for tile, text in visible_tiles(page).items() if UNKNOWN.match(text)]
            assert not unknown, f"{name}: {unknown}"
            assert page.locator("[data-connection]").is_visible() == is_live
            head = visible_tiles(page).get("confirmed")
            chips = page.locator("#checkpoints [data-label=Confirmed]").all_inner_texts()
            assert head is None or f"By {head}" in chips, f"{name}: {head}, {chips}"
            seen = page.locator("main").inner_text()
            assert not [text for text in EMPTY_TEXTS if text in seen], name
            assert_still(page)
            page.set_viewport_size({"width": 360, "height": 900})
            assert not page.evaluate(FIND_CLIPPED), name
            page.set_viewport_size({"width": 1280, "height": 900})


def test_figure_is_the_same_on_every_page_and_in_the_terminal(names, site, browser, monkeypatch):
    slug = names["finished_run"]
    with open_page(browser, site) as page:
        page.goto(f"/runs/{slug}/")
        expect(page.locator("[data-connection]")).to_have_attribute("data-connection", "live")
        tiles = visible_tiles(page)
        final, tokens, duration = tiles["final"], tiles["tokens"].split(" of")[0], tiles["elapsed"]
        train = page.locator("[data-loss-chart] [data-readout=train]")
        expect(train).not_to_have_text("–")
        training, legend = train.inner_text(), page.locator("[data-readout=validation]")
        assert legend.inner_text() == final
        spoken = page.locator("[data-summary]").text_content()
        assert f"training loss {training}, validation loss {final}" in spoken
        assert final in page.locator("#checkpoints").text_content()
        size = page.locator("#checkpoints [data-label=Size]").text_content()
        assert size in page.locator("#model").text_content()
        page.goto(f"/runs/?q={slug}")
        row = page.locator("#runs tbody tr", has_text="Harvest")
        assert final in row.inner_text() and tokens in row.inner_text()
        _, *live = row.locator("td.is-number").all_inner_texts()
        assert live == ["–", "–", "–"], "speed, machines and time left are of a run that trains"
        page.goto(f"/runs/compare/?run={slug}")
        table = page.locator("table", has_text="Validation, last").inner_text()
        assert final in table and training in table and tokens in table and duration in table
        expect(page.locator("[data-machine-legend] b")).to_have_text(training)
    token = site.manage("shell", "-v", "0", "-c", CREATE_TOKEN).splitlines()[-1]
    monkeypatch.setenv("BARNRAISE_TOKEN", token)
    monkeypatch.setenv("BARNRAISE_SITE", site.url)
    monkeypatch.setenv("COLUMNS", "200")
    shown = invoke("runs", "show", slug)
    assert f"{training} training, {final} validation" in shown
    assert final in invoke("runs", "history", slug)
