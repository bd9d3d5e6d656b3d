"""A whole site and a browser, once for all browser tests."""

import os
import re
from collections.abc import Iterator

import psycopg
import pytest
from chromium import found
from live_site import EMAIL, PASSWORD, Site
from playwright.sync_api import Browser, Page, sync_playwright

DATABASE = "barnraise_browser"
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


@pytest.fixture(scope="session")
def site(state, tmp_path_factory) -> Iterator[Site]:
    server = os.environ["DATABASE_URL"]
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {DATABASE}")
    ours = Site(tmp_path_factory.mktemp("site"), re.sub(r"/barnraise(?=\?|$)", f"/{DATABASE}", server))
    assert ours.environment["DATABASE_URL"] != server
    ours.environment["REDIS_URL"] = re.sub(r"/0$", "/1", os.environ["REDIS_URL"])
    ours.manage("migrate", "--verbosity", "0")
    ours.manage("prepare_owner", "--email", EMAIL, "--password", PASSWORD, "--name", "Ida", "--staff")
    ours.start_web()
    ours.start_celery()
    yield ours
    ours.family.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    where = found()
    assert where, "the browser tests need Chromium: `make test` installs it, or name one in $CHROMIUM"
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=where, args=QUIET)


@pytest.fixture
def page(browser, site) -> Iterator[Page]:
    """A fresh visitor. Anything the page's script complains of fails the test."""
    context = browser.new_context(base_url=site.url, viewport={"width": 1280, "height": 900})
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert not complaints
