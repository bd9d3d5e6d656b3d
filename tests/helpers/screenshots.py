"""Looking at a page as people will: photographed in both themes, wide and narrow, and held against axe-core.

axe-core is a development dependency of the frontend. It is handed to the page by the browser's own protocol, beside the
page's policy, which stays as strict as for everybody.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from helpers.paths import ROOT
from playwright.sync_api import Browser, Page

SHOTS = ROOT / "build" / "screenshots"
WIDTHS = (1280, 360)
THEMES = ("light", "dark")
# Unfold's scrolling sidebar and its scrolling table are two regions of one name (SimpleBar's "scrollable content"):
# axe-core finds that on pages of the staff, and only Unfold can mend it.
UPSTREAM = ("simplebar-content-wrapper",)
DIALOG = (
    *UPSTREAM,
    "region:",
)  # …and where its dialog is open it leaves the page without landmarks
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
    """A fresh one. Anything the page's script complains of fails the test."""
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
    """What axe-core finds on the page as it stands, a sentence each. `colours`: by its rules on these alone."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe())
    return page.evaluate(AUDIT, colours)


def check_page(
    page: Page, name: str, *, not_ours: tuple[str, ...] = (), renew: bool = False
) -> None:
    """Photographs the page, and fails if axe-core finds anything or it is wider than its window. `not_ours`: words in
    the findings that others have to mend. `renew`: the page must load again to change its theme."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    wide, found = page.viewport_size, []
    for theme in THEMES:
        page.emulate_media(
            color_scheme=theme, reduced_motion="reduce"
        )  # nothing is caught half-faded
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
