"""Load a new page from a page, and wait for it.

A click returns as soon as the browser has received it. Whatever a test does next may still meet the
old page: a second click on it is lost, and a `goto` cancels a form that is being sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Locator, Page


@contextmanager
def new_page_loaded(page: Page) -> Iterator[None]:
    """Wait at the end of the block until the page that it requested has loaded."""
    with page.expect_navigation():
        yield


def click_and_load(control: Locator) -> None:
    """Click a link or submit a form, and wait until the new page has loaded."""
    with new_page_loaded(control.page):
        control.click()
