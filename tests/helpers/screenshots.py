"""Check a page as people see it: screenshots in both themes, wide and narrow, and axe-core.

axe-core is a development dependency of the frontend. The browser's own protocol injects it, so that
the page's content security policy stays as strict as for everybody.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from helpers.paths import ROOT
from playwright.sync_api import Browser, Page

SHOTS = ROOT / "build" / "screenshots"
WIDTHS = (1280, 360)
THEMES = ("light", "dark")
# Unfold gives its sidebar and its table regions of the same name (SimpleBar's "scrollable content").
# axe-core reports that on the admin's pages, and only Unfold can fix it.
UPSTREAM = ("simplebar-content-wrapper",)
# An open dialog of Unfold leaves the page without landmarks.
DIALOG = (*UPSTREAM, "region:")
AUDIT = """async (colours) => {
  await document.fonts.ready;
  const only = colours ? { runOnly: { type: 'rule', values: ['color-contrast', 'link-in-text-block'] } } : {};
  const { violations } = await axe.run(document, { resultTypes: ['violations'], ...only });
  return violations.flatMap(({ id, help, nodes }) =>
    nodes.map(({ target, any, all, none }) =>
      `${id}: ${help}: ${target.join(' ')}: ${[...any, ...all, ...none].map((check) => check.message).join('; ')}`));
}"""


@contextmanager
def open_page(browser: Browser, site, *, width: int = 1280) -> Iterator[Page]:
    """Open a page in a new browser context; an error of its script fails the test."""
    context = browser.new_context(base_url=site.url, viewport={"width": width, "height": 900})
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert not complaints


@cache
def axe() -> str:
    found = ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
    assert found.exists(), "axe-core is not installed: `python frontend/build.py` does it"
    return found.read_text()


def find_violations(page: Page, colours: bool = False) -> list[str]:
    """Return what axe-core finds on the page, a sentence each.

    `colours` runs only the rules on colours.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe())
    return page.evaluate(AUDIT, colours)


def check_page(
    page: Page, name: str, *, not_ours: tuple[str, ...] = (), renew: bool = False
) -> None:
    """Take screenshots, and fail if axe-core finds anything or the page is wider than its window.

    Args:
        page: The page.
        name: The name of the screenshots.
        not_ours: Words in findings that only other projects can fix.
        renew: Whether the page must be reloaded to change its theme.
    """
    SHOTS.mkdir(parents=True, exist_ok=True)
    wide, found = page.viewport_size, []
    for theme in THEMES:
        page.emulate_media(
            color_scheme=theme, reduced_motion="reduce"
        )  # no screenshot in the middle of a transition
        if renew:
            page.reload()
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            again = theme == THEMES[1]  # a theme changes colours and nothing else
            found += [f"{theme}, {width}: {each}" for each in find_violations(page, colours=again)]
            if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
                found.append(f"{needed} px wide in a window of {width}")
            page.screenshot(path=SHOTS / f"{name}-{theme}-{width}.png", full_page=True)
    page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    page.set_viewport_size(wide)
    ours = [each for each in dict.fromkeys(found) if not any(word in each for word in not_ours)]
    assert not ours, f"{name}:\n" + "\n".join(ours)
