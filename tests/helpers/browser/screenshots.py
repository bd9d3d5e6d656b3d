"""Check a page as people see it: in both themes, wide and narrow, by axe-core and in screenshots.

axe-core is a development dependency of the frontend. The browser's own protocol injects it, so that
the page's content security policy stays as strict as for everybody.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from helpers.effort import EXHAUSTIVE
from helpers.paths import ROOT
from playwright.sync_api import Browser, Page

PATIENCE_MS = 120_000  # other processes may use the machine that runs the tests
SHOTS = ROOT / "build" / "screenshots"
# Pairs of a theme and a width in pixels: a page that fits a phone fits it in both themes.
VIEWS = (("light", 1280), ("dark", 360))
ALL_VIEWS = (("light", 1280), ("light", 360), ("dark", 1280), ("dark", 360))
MAX_HEIGHT = 8000  # pixels of a window that shows a whole page
# Unfold names the regions of its sidebar and of its table alike (SimpleBar's "scrollable
# content"). axe-core reports that on the admin's pages, and only Unfold can fix it.
UPSTREAM = ("simplebar-content-wrapper",)
# An open dialog of Unfold leaves the page without landmarks.
DIALOG = (*UPSTREAM, "region:")
AUDIT = """async (onlyColours) => {
  await document.fonts.ready;
  const colourRules = { type: 'rule', values: ['color-contrast', 'link-in-text-block'] };
  const options = { resultTypes: ['violations'], ...(onlyColours && { runOnly: colourRules }) };
  const { violations } = await axe.run(document, options);
  return violations.flatMap(({ id, help, nodes }) =>
    nodes.map(({ target, any, all, none }) => {
      const messages = [...any, ...all, ...none].map((check) => check.message);
      return `${id}: ${help}: ${target.join(' ')}: ${messages.join('; ')}`;
    }));
}"""


# Cards whose last content ends more than 40 px above the card's padding.
FIND_SPARE_ROOM = """() => [...document.querySelectorAll('main .card')].filter((card) => {
  const fold = card.closest('details:not([open])');
  if (fold && fold !== card) return false;
  const shown = [...card.children].filter((part) => part.getBoundingClientRect().height > 0);
  if (!shown.length) return false;
  const padding = parseFloat(getComputedStyle(card).paddingBottom);
  const end = Math.max(...shown.map((part) => part.getBoundingClientRect().bottom));
  return card.getBoundingClientRect().bottom - padding - end > 40;
}).map((card) => card.className)"""
# Counts that disagree with their nouns, which neither pages nor terminals should show.
WRONG_NUMBER = (
    r"(?<![\d.,] )(?<![\d.,])\b1 (?:machines|people|volunteers|runs|updates|events|files|tokens|"
    r"steps|cores|copies|rows|documents|checkpoints|teams|members|days|hours|layers|tasks|peers)\b"
)
# Words that no page should show: markup of our sentences, values of programs, names of fields.
BLEMISH = re.compile(rf"`|\b(?:NaN|undefined|null)\b|^None$|\b[a-z]+_[a-z_]+\b|{WRONG_NUMBER}")
READ_SENTENCES = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const shown = [];
  while (texts.nextNode()) {
    const box = texts.currentNode.parentElement;
    if (box.closest('code, pre, script, style, template, textarea, .prose, .sample')) continue;
    if (box.checkVisibility()) shown.push(texts.currentNode.data.trim());
  }
  return shown;
}"""
# Figures and buttons whose ends are cut off, and rows of buttons that go on beyond their edge.
FIND_CLIPPED = """() => [...document.querySelectorAll('main :is(.value, .button, .buttons)')]
  .filter((part) => part.checkVisibility() && part.scrollWidth > part.clientWidth + 1)
  .map((part) => `clipped: ${part.textContent.trim()}`)"""
# Words of a table that are broken in their middle: its columns are too narrow.
FIND_BROKEN_WORDS = """() => {
  const texts = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  const broken = [];
  const range = document.createRange();
  while (texts.nextNode()) {
    const box = texts.currentNode.parentElement;
    if (!box.closest('td, th, dt, dd, button, h1, h2, h3') || !box.checkVisibility()) continue;
    if (box.closest('code')) continue;
    for (const word of texts.currentNode.data.matchAll(/[A-Za-z]{3,14}/g)) {
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map((line) => Math.round(line.top)));
      if (tops.size > 1) broken.push(`broken word: ${word[0]}`);
    }
  }
  return broken;
}"""
# A right-to-left override in a name, and text after the name that it turns. The names that the
# examples have with one end in 🪵 or 🧵; an element of its own or U+2069 ends what it turns.
FIND_TURNED_TEXT = """() => {
  const turned = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    if (!texts.currentNode.data.includes('\\u202e')) continue;
    if (texts.currentNode.parentElement.localName === 'title') continue;
    let box = texts.currentNode.parentElement;
    const isInline = (style) => style.display === 'inline' && style.unicodeBidi === 'normal';
    while (isInline(getComputedStyle(box))) box = box.parentElement;
    const rest = /\\u202e[^🪵🧵]*[🪵🧵]\\s*[^\\s\\u2069]/u;
    if (rest.test(box.textContent)) turned.push(box.outerHTML);
  }
  return turned;
}"""


MAX_SHIFT = 0.02  # cumulative layout shift of a page while it loads, or while a run ends
OBSERVE_SHIFTS = """
window.layoutShifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (!entry.hadRecentInput) layoutShifts.push(entry.value);
  }
}).observe({ type: 'layout-shift', buffered: true });
"""
WAIT_FOR_FRAMES = """async () => {
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
}"""
SUM_SHIFTS = """async (first) => {
  await document.fonts.ready;
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  return layoutShifts.slice(first).reduce((sum, shift) => sum + shift, 0);
}"""


@contextmanager
def open_page(browser: Browser, site, *, width: int = 1280) -> Iterator[Page]:
    """Open a page in a new browser context; an error of its script fails the test."""
    context = browser.new_context(base_url=site.url, viewport={"width": width, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(OBSERVE_SHIFTS)
    page = context.new_page()
    script_errors: list[str] = []
    page.on("pageerror", lambda error: script_errors.append(str(error)))
    yield page
    context.close()
    assert not script_errors


def count_shifts(page: Page) -> int:
    """Count the layout shifts of a page until now, for `assert_still`."""
    return page.evaluate("layoutShifts.length")


def assert_still(page: Page, since: int = 0) -> None:
    """Fail if parts of the page have moved since it was loaded, or since so many shifts."""
    shift = page.evaluate(SUM_SHIFTS, since)
    assert shift <= MAX_SHIFT, f"{page.url} moved by {shift:.3f}"


@cache
def read_axe() -> str:
    """Return axe-core's script."""
    path = ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
    assert path.exists(), "axe-core is not installed: run `python frontend/build.py`"
    return path.read_text()


def find_violations(page: Page, only_colours: bool = False) -> list[str]:
    """Return what axe-core finds on the page, a sentence for each finding."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(read_axe())
    return page.evaluate(AUDIT, only_colours)


def show_whole_page(page: Page, width: int) -> None:
    """Make the window as high as its page: charts and cards are drawn only in sight.

    Before it is seen, a part has an assumed height; afterwards the page has its own.
    """
    for _ in range(2):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(WAIT_FOR_FRAMES)
        height = page.evaluate("document.documentElement.scrollHeight")
        page.set_viewport_size({"width": width, "height": min(height, MAX_HEIGHT)})
        page.evaluate(WAIT_FOR_FRAMES)


def check_page(
    page: Page, name: str, *, not_ours: tuple[str, ...] = (), renew: bool = False
) -> None:
    """Fail if axe-core finds anything on the page or it is wider than its window.

    `make test` looks at two views of a page, at the second one for its colours and its width;
    `make test-all` looks at both themes in both widths, and takes screenshots of them.

    Args:
        page: The page.
        name: The name of the screenshots.
        not_ours: Words in findings that only other projects can fix.
        renew: Whether the page must be reloaded to change its theme.
    """
    SHOTS.mkdir(parents=True, exist_ok=True)
    original_size = page.viewport_size
    findings = []
    current_theme = None
    checked_widths: set[int] = set()
    for theme, width in ALL_VIEWS if EXHAUSTIVE else VIEWS:
        if theme != current_theme:
            # Without motion, no screenshot shows the middle of a transition.
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            if renew:
                page.reload()
            current_theme = theme
        page.set_viewport_size({"width": width, "height": 900})
        if EXHAUSTIVE:
            show_whole_page(page, width)
        # A second theme at the same width changes colours and nothing else.
        is_known = width in checked_widths if EXHAUSTIVE else bool(checked_widths)
        violations = find_violations(page, only_colours=is_known)
        checked_widths.add(width)
        findings += [f"{theme}, {width}: {violation}" for violation in violations]
        page_width = page.evaluate("document.documentElement.scrollWidth")
        if page_width > width:
            findings.append(f"{page_width} px wide in a window of {width}")
        if not not_ours:  # on our own pages
            findings += page.evaluate(FIND_TURNED_TEXT)
            findings += [
                text for text in page.evaluate(READ_SENTENCES) if text and BLEMISH.search(text)
            ]
            findings += [f"spare room: {card}" for card in page.evaluate(FIND_SPARE_ROOM)]
        if EXHAUSTIVE:
            page.screenshot(path=SHOTS / f"{name}-{theme}-{width}.png", full_page=True)
    page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    page.set_viewport_size(original_size)
    ours = [
        finding
        for finding in dict.fromkeys(findings)
        if not any(words in finding for words in not_ours)
    ]
    assert not ours, f"{name}:\n" + "\n".join(ours)
