"""A browser in front of the live site."""

from collections.abc import Iterator

import pytest
from helpers.browser.chromium import find_browser
from helpers.browser.screenshots import open_page
from playwright.sync_api import Browser, Page, expect, sync_playwright

PATIENCE_MS = 240_000  # other processes may use the machine that runs the tests
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Launch a browser for one module.

    Playwright runs an event loop in this thread, and other tests need event loops of their own.
    """
    executable = find_browser()
    assert executable, (
        "the browser tests need Chromium: `make test` installs it, or name one in $CHROMIUM"
    )
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=executable, args=BROWSER_FLAGS)


@pytest.fixture
def page(browser, site) -> Iterator[Page]:
    with open_page(browser, site) as page:
        yield page
