"""A browser in front of the live site."""

from collections.abc import Iterator

import pytest
from helpers.chromium import found
from helpers.screenshots import open_page
from playwright.sync_api import Browser, Page, sync_playwright

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one module: Playwright keeps an event loop running in this thread, and others' tests bring their own."""
    where = found()
    assert where, (
        "the browser tests need Chromium: `make test` installs it, or name one in $CHROMIUM"
    )
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=where, args=QUIET)


@pytest.fixture
def page(browser, site) -> Iterator[Page]:
    with open_page(browser, site) as page:
        yield page
