"""A page whose mirror is killed continues at another one, shows that, and returns."""

import re

import pytest
from helpers.live_site import wait_until
from helpers.mirror_pair import PASSWORD, ReportingMachine, create_run, publish_list, two_mirrors
from helpers.screenshots import check_page, open_page
from playwright.sync_api import expect


@pytest.fixture(scope="module")
def sites(state, tmp_path_factory):
    expect.set_options(timeout=90_000)
    folder = tmp_path_factory.mktemp("mirrors")
    with two_mirrors(folder) as (a, b):
        names = create_run(a)
        digest = publish_list(a, b, folder)
        a.start()
        b.manage("replication", "join", a.url, "--list", digest)
        b.start()
        yield a, b, names
        expect.set_options(timeout=5_000)


def test_run_page_own_mirror_killed_continues_at_another_and_returns(browser, sites):
    a, b, names = sites
    run, barn = names["run"], ReportingMachine(1)
    a.start_tasks()
    b.start_tasks()
    barn.send_reports(a, run, 1, 2, 3)
    with open_page(browser, a) as page:
        reached: list[str] = []
        page.on("websocket", lambda socket: reached.append(socket.url))
        page.goto(f"/runs/{run}/")
        sign, elsewhere = page.locator("[data-link]"), page.locator("[data-elsewhere]")
        tokens, described = page.locator('[data-figure="tokens"]'), page.locator("#loss-words")
        expect(sign).to_have_text(re.compile(r"Live\s*by A"))
        expect(elsewhere).to_be_hidden()
        expect(tokens).to_have_text("3.00 K")
        barn.send_reports(a, run, 4, joined=True)
        expect(tokens).to_have_text("4.00 K")
        wait_until(
            lambda: [x for x, _ in b.snapshot(run)["train"]][-1:] == [4000], "B to hear of it"
        )
        drawn = described.text_content()

        a.kill()
        expect(sign).to_have_text("Reconnecting")
        expect(sign).to_have_text(re.compile(r"Live\s*by B"))
        expect(elsewhere).to_have_text("A does not answer. This page at B")
        assert elsewhere.get_by_role("link").get_attribute("href") == f"{b.url}/runs/{run}/"
        assert page.locator("[data-stale]").get_attribute("data-stale") == "false"
        expect(tokens).to_have_text("4.00 K")
        assert described.text_content() == drawn, "the chart is what it was"
        barn.send_reports(b, run, 5)
        expect(tokens).to_have_text("5.00 K")
        expect(page.locator('[data-figure="known"]')).to_have_text("1")
        page.get_by_label("Training, each machine").check()
        expect(page.locator("[data-machine-lines]")).to_contain_text("barn")
        check_page(page, "run-elsewhere")
        assert {re.match(r"ws://[^/]+", url)[0] for url in reached} == {
            f"ws{s.url[4:]}" for s in (a, b)
        }
        wait_until(
            lambda: [x for x, _ in b.snapshot(run)["train"]] == [1000, 2000, 3000, 4000, 5000],
            "all once",
        )

        a.start()
        expect(sign).to_have_text(re.compile(r"Live\s*by A"))
        expect(elsewhere).to_be_hidden()
        page.goto("/runs/")
        expect(page.get_by_text("Two roofs")).to_be_visible()


def test_draft_page_own_mirror_killed_links_to_another_mirror(browser, sites):
    a, b, names = sites
    with open_page(browser, a) as page:
        reached: list[str] = []
        page.goto("/accounts/login/")
        page.get_by_label("Email").fill("ida@example.org")
        page.get_by_label("Password").first.fill(PASSWORD)
        page.get_by_role("button", name=re.compile("sign in", re.I)).last.click()
        page.wait_for_url(lambda url: "/accounts/login" not in url)
        page.goto(f"/runs/{names['draft']}/")
        page.on("request", lambda request: reached.append(request.url))
        page.on("websocket", lambda socket: reached.append(socket.url))
        sign, elsewhere = page.locator("[data-link]"), page.locator("[data-elsewhere]")
        expect(sign).to_have_text(re.compile(r"Live\s*by A"))
        a.kill()
        expect(sign).to_have_text("Reconnecting")
        expect(elsewhere).to_have_text("This page at B")
        check_page(page, "run-draft-gone")
        page.wait_for_timeout(3_000)
        assert not [url for url in reached if f":{b.port}" in url]
