"""A page whose mirror is killed continues at another one, shows that, and returns."""

import re
from collections.abc import Callable

import pytest
from helpers.browser.screenshots import check_page, open_page
from helpers.mirrors.mirror_pair import (
    PASSWORD,
    MirrorProcess,
    ReportingMachine,
    create_run,
    publish_list,
    two_mirrors,
)
from helpers.site.live_site import log_in, wait_until
from playwright.sync_api import Page, WebSocket, expect


@pytest.fixture(scope="module")
def sites(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirrors")
    with two_mirrors(folder) as (a, b):
        names = create_run(a)
        digest = publish_list(a, b, folder)
        a.start()
        b.manage("replication", "join", a.url, "--list", digest)
        b.start()
        yield a, b, names


def tokens_of_the_curve(site: MirrorProcess, run: str) -> list[float]:
    """Return the places of the training curve's points in a mirror's snapshot of a run."""
    return [tokens for tokens, _ in site.snapshot(run)["train"]]


@pytest.mark.slow  # frontend/tests and platform/replication test both sides of it
def test_run_page_own_mirror_killed_continues_at_another_and_returns(browser, sites):
    a, b, names = sites
    run = names["run"]
    barn = ReportingMachine(1)
    a.start_tasks()
    b.start_tasks()
    barn.send_reports(a, run, 1, 2, 3)
    with open_page(browser, a) as page:
        socket_urls: list[str] = []
        page.on("websocket", lambda socket: socket_urls.append(socket.url))
        page.goto(f"/runs/{run}/")
        connection, other_mirrors = (
            page.locator("[data-connection]"),
            page.locator("[data-other-mirrors]"),
        )
        tokens = page.locator('[data-figure="tokens"]').first
        chart_description = page.locator("#loss-summary")
        expect(connection).to_have_text(re.compile(r"Live\s*by A"))
        expect(other_mirrors).to_be_hidden()
        expect(tokens).to_have_text("3.00 K")
        barn.send_reports(a, run, 4, joined=True)
        expect(tokens).to_have_text("4.00 K")
        wait_until(lambda: tokens_of_the_curve(b, run)[-1:] == [4000], "the report at B")
        wait_until(lambda: b.snapshot(run)["run"]["tokens"] == 4000, "the count at B")
        description = chart_description.text_content()

        a.kill()
        expect(connection).to_have_text("Reconnecting")
        expect(connection).to_have_text(re.compile(r"Live\s*by B"))
        expect(other_mirrors).to_have_text("A does not answer. This page at B")
        assert other_mirrors.get_by_role("link").get_attribute("href") == f"{b.url}/runs/{run}/"
        assert page.locator("[data-stale]").get_attribute("data-stale") == "false"
        expect(tokens).to_have_text("4.00 K")
        assert chart_description.text_content() == description, "the chart has not changed"
        barn.send_reports(b, run, 5)
        expect(tokens).to_have_text("5.00 K")
        expect(page.locator('[data-figure="workers_known"]')).to_have_text("1")
        page.get_by_label("Training, each machine").check()
        expect(page.locator("[data-loss-chart] [data-machine-legend]")).to_contain_text("barn")
        check_page(page, "run-elsewhere")
        assert {re.match(r"ws://[^/]+", url)[0] for url in socket_urls} == {
            site.url.replace("http", "ws", 1) for site in (a, b)
        }
        wait_until(
            lambda: tokens_of_the_curve(b, run) == [1000, 2000, 3000, 4000, 5000],
            "each report once at B",
        )

        a.start()
        expect(connection).to_have_text(re.compile(r"Live\s*by A"))
        expect(other_mirrors).to_be_hidden()
        page.goto("/runs/")
        expect(page.get_by_text("Two roofs")).to_be_visible()


@pytest.mark.slow  # the parts are tested in frontend/tests; a slow browser costs much
def test_page_of_a_slow_device_receives_its_messages_from_a_worker(browser, sites):
    a, _, names = sites
    with open_page(browser, a) as page:
        sockets: list[WebSocket] = []
        page.on("websocket", lambda socket: sockets.append(socket))
        page.goto(f"/runs/{names['run']}/")
        known = page.locator('[data-figure="workers_known"]')
        expect(known).to_have_text("1")
        page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 20})
        wait_until(lambda: _poll(page, sockets[0].is_closed), "the end of the page's own socket")
        [worker] = page.workers
        assert "/messageWorker-" in worker.url
        ReportingMachine(2).send_reports(a, names["run"], 1)
        expect(known).to_have_text("2")
        expect(page.locator("[data-connection]")).to_have_text(re.compile(r"Live\s*by A"))
        assert [socket.is_closed() for socket in sockets] == [True, False], "the worker's is open"


def _poll(page: Page, happened: Callable[[], bool]) -> bool:
    """Let the browser's events arrive, and return whether something has happened."""
    page.wait_for_timeout(100)
    return happened()


@pytest.mark.slow  # a run's page that loses its mirror is tested above
def test_draft_page_own_mirror_killed_links_to_another_mirror(browser, sites):
    a, b, names = sites
    with open_page(browser, a) as page:
        requested_urls: list[str] = []
        log_in(page, "ida@example.org", PASSWORD)
        page.goto(f"/runs/{names['draft']}/")
        page.on("request", lambda request: requested_urls.append(request.url))
        page.on("websocket", lambda socket: requested_urls.append(socket.url))
        connection, other_mirrors = (
            page.locator("[data-connection]"),
            page.locator("[data-other-mirrors]"),
        )
        expect(connection).to_have_text(re.compile(r"Live\s*by A"))
        a.kill()
        expect(connection).to_have_text("Reconnecting")
        expect(other_mirrors).to_have_text("This page at B")
        check_page(page, "run-draft-gone")
        page.wait_for_timeout(3_000)
        assert not [url for url in requested_urls if f":{b.port}" in url]
