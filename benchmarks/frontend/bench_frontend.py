"""Measure what the pages cost a reader: `make bench-frontend`, 8 minutes; QUICK=1: 3 minutes.

A site with a run of 200 machines and 50,000 measured losses is opened in a headless Chromium whose
processor is slowed down four times. Measured are: the time until the run's page is drawn, live and
quiet; the main thread's work for each delta while 20 machines a second report; the growth of the
page's memory over 30 minutes of deltas, replayed twenty times as fast; the compressed JavaScript of
the run's page and of every other page; layout shifts on every page, and on the run's page while
machines join and the run ends; and what axe-core finds on every page. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
for folder in ("benchmarks/shared", "benchmarks/site", "tests"):
    sys.path.insert(0, str(ROOT / folder))

from child_processes import ChildProcesses  # noqa: E402  (benchmarks/shared)
from helpers.browser.chromium import find_browser  # noqa: E402  (tests)
from site_stack import Site  # noqa: E402  (benchmarks/site)

MACHINES = 200
OPENINGS = 5  # of the run's page, each in a browser without a cache; the median counts
POINTS = 50_000
DELTA_SECONDS = 40.0
DELTAS = 1_800  # of 30 minutes
REPORTS_PER_SECOND = 20
# The windows in which pages are looked at: width and theme.
VIEWS: tuple[tuple[int, Literal["light", "dark"]], ...] = ((1280, "light"), (390, "dark"))
SETTLE_MS = 3_000  # after which a page has loaded what it loads by itself
BROWSER_FLAGS = ("--no-sandbox", "--disable-gpu", "--enable-precise-memory-info")
TARGETS = {
    "interactive_s": 1.5,
    "delta_ms": 8.0,
    "memory_growth": 0.10,
    "run_page_js_kb": 120.0,
    "other_js_kb": 30.0,
    "cls": 0.02,
    "axe": 0,
}


def main() -> int:
    """Run the benchmark, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a third of the deltas")
    options = parser.parse_args()
    browser_path = find_browser()
    if not browser_path:
        sys.exit("This benchmark needs Chromium: install it, or name one in $CHROMIUM.")
    # Playwright runs an event loop in this thread, between whose turns the site's database is used.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bench-frontend-")))
        children = ChildProcesses(folder, cleanup)
        site = Site(folder, 1, children)
        cleanup.callback(site.stop)
        site.start()
        figures = measure_site(site, browser_path, options.quick)
        print(f"load average: {os.getloadavg()}", flush=True)
    missed = [name for name, target in TARGETS.items() if figures[name] > target]
    for name in missed:
        print(f"{name}: {figures[name]}, the target is {TARGETS[name]}", flush=True)
    print(json.dumps(figures))
    return 1 if missed else 0


def measure_site(site: Site, browser_path: str, is_quick: bool) -> dict[str, Any]:
    """Fill the site and measure its pages."""
    import page_probe
    import seed_pages
    from playwright.sync_api import sync_playwright

    print(f"filling the site: {MACHINES} machines, {POINTS:,} losses", flush=True)
    busy = seed_pages.BusyRun(MACHINES, POINTS)
    machine = seed_pages.create_machine_with_history(busy.owner)
    session = seed_pages.create_session(busy.owner)
    pages = list_pages(busy.path, str(machine.pk))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=BROWSER_FLAGS)
        with page_probe.open_context(browser, site.url) as context:
            context.new_page().goto(busy.path)  # the site's caches are warm afterwards
        openings = []
        for _ in range(OPENINGS):
            scripts = page_probe.LoadedScripts()
            with page_probe.open_context(browser, site.url) as context:
                page = context.new_page()
                page.on("response", scripts.add)
                openings.append(page_probe.measure_interactive(page, busy.path))
        interactive = statistics.median(openings)
        print(f"the run's page: {openings} s until it is usable", flush=True)
        seconds = DELTA_SECONDS / 3 if is_quick else DELTA_SECONDS
        with closing(page_probe.BarePage(browser, site.url)) as bare:
            opening = page_probe.measure_main_thread(bare, busy.path)
            deltas = page_probe.measure_deltas(
                bare, seconds, lambda: busy.report_some(REPORTS_PER_SECOND), busy.read_number
            )
            print(f"at full speed: opened {opening}, deltas {deltas}", flush=True)
        with closing(page_probe.BarePage(browser, site.url, page_probe.CPU_SLOWDOWN)) as bare:
            page_probe.open_until_usable(bare, busy.path)
            deltas = page_probe.measure_deltas(
                bare, seconds, lambda: busy.report_some(REPORTS_PER_SECOND), busy.read_number
            )
            print(f"deltas: {deltas}", flush=True)
            live_shift, shifted = page_probe.measure_shift(bare)
            print(f"the run's page: shift {live_shift} {shifted}", flush=True)
        with page_probe.open_context(browser, site.url) as context:
            count = DELTAS // 3 if is_quick else DELTAS
            memory = page_probe.measure_memory(
                context.new_page(), busy.path, str(busy.run.pk), count
            )
            print(f"memory: {memory}", flush=True)
        end_shift = measure_run_end(browser, site, busy, session)
        other = measure_pages(browser, site, pages, session)
        browser.close()
    return {
        "interactive_s": interactive,
        "delta_ms": deltas["delta_ms"],
        "memory_growth": memory["memory_growth"],
        "run_page_js_kb": scripts.kilobytes,
        "other_js_kb": other["js_kb"],
        "cls": max(live_shift, end_shift, other["cls"]),
        "axe": other["axe"],
    }


def list_pages(run_path: str, machine: str) -> dict[str, bool]:
    """Return the pages' addresses, and whether they are opened signed in."""
    return {
        "/": False,
        "/runs/": False,
        "/accounts/login/": False,
        "/accounts/signup/": False,
        "/credit/": False,
        "/mirrors/": False,
        "/runs/?sort=loss": True,
        f"/runs/compare/?run={run_path.strip('/').rsplit('/', 1)[1]}": True,
        "/runs/new/": True,
        run_path: True,
        f"{run_path}terms/": True,
        f"{run_path}verdicts/": True,
        "/machines/": True,
        f"/machines/{machine}/": True,
        "/account/": True,
        "/account/tokens/": True,
        "/notifications/": True,
        "/notifications/settings/": True,
        "/teams/": True,
    }


def measure_run_end(browser: Any, site: Site, busy: Any, session: str) -> float:
    """Watch a run from its first machine to its end, and return the layout shift meanwhile."""
    import page_probe
    import seed_site

    from barnraise.protocol.enums import RunStatus

    run = seed_site.create_training_run("A run that ends", 10.0)
    with page_probe.open_context(browser, site.url, session) as context:
        page = context.new_page()
        page.goto(run.get_absolute_url())
        page.locator("[data-connection=live]").wait_for()
        page.wait_for_timeout(SETTLE_MS)
        members = busy.members
        type(members[0]).objects.create(run=run, machine=members[0].machine, activity="training")
        page.locator("[data-cell=name]").first.wait_for()
        page.wait_for_timeout(SETTLE_MS)
        type(run).objects.filter(pk=run.pk, status=RunStatus.TRAINING).update(
            status=RunStatus.FINISHED, finished=run.started
        )
        page.locator("[data-status-chip][data-status=finished]").wait_for()
        page.wait_for_timeout(SETTLE_MS)
        shift, shifted = page_probe.measure_shift(page)
    print(f"a run from its first machine to its end: shift {shift} {shifted}", flush=True)
    return shift


def measure_pages(
    browser: Any, site: Site, pages: dict[str, bool], session: str
) -> dict[str, float]:
    """Open every page wide and narrow; return the worst shift, JavaScript and axe's findings."""
    import page_probe
    from helpers.browser.screenshots import find_violations

    worst_shift = 0.0
    most_script = 0.0
    findings: set[str] = set()
    for path, is_signed_in in pages.items():
        with page_probe.open_context(browser, site.url, session if is_signed_in else "") as context:
            for width, theme in VIEWS:
                page = context.new_page()
                scripts = page_probe.LoadedScripts()
                page.on("response", scripts.add)
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=theme)
                page.goto(path)
                page.wait_for_timeout(SETTLE_MS)
                shift, shifted = page_probe.measure_shift(page)
                if shift > TARGETS["cls"]:
                    print(f"{path} {width}: shift {shift} of {shifted}", flush=True)
                worst_shift = max(worst_shift, shift)
                has_charts = page.locator("[data-plot]").count() > 0
                if not has_charts:
                    most_script = max(most_script, scripts.kilobytes)
                for finding in find_violations(page):
                    findings.add(finding)
                    print(f"{path} {width} {theme}: {finding}", flush=True)
                page.close()
    return {"cls": worst_shift, "js_kb": most_script, "axe": len(findings)}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
