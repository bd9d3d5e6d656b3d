"""The theme switch and the system's preference select the colours of a page."""

import re

import pytest
from helpers.paths import ROOT
from playwright.sync_api import Page

TOKENS = (ROOT / "frontend" / "src" / "css" / "tokens.css").read_text()
PALETTE = re.compile(r"(--[\w-]+): light-dark\((#\w+|rgb\([^)]*\)), (#\w+|rgb\([^)]*\))\);")
# The colour that an element and a canvas get from a custom property, and the one that it should be.
READ_COLOURS = """palette => {
  const probe = document.body.appendChild(document.createElement("i"));
  const canvas = document.createElement("canvas").getContext("2d");
  const compute = (colour) => {
    probe.style.color = colour;
    return getComputedStyle(probe).color;
  };
  const draw = (colour) => {
    canvas.fillStyle = "lime"; // stays if the canvas does not know the other colour
    canvas.fillStyle = colour;
    return canvas.fillStyle;
  };
  const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colours = palette.map(([name, expected]) => [
    name, compute(`var(${name})`), compute(expected), draw(token(name)), draw(expected),
  ]);
  probe.remove();
  return colours;
}"""


@pytest.mark.parametrize("system", ["light", "dark"])
def test_pages_have_the_colours_of_the_theme_that_is_chosen(page: Page, system):
    palette = PALETTE.findall(TOKENS)
    assert len(palette) > 30
    page.emulate_media(color_scheme=system, reduced_motion="reduce")
    page.goto("/")
    switch = page.locator("[data-theme-switch]")
    for choice in ("as your system", "light", "dark"):
        assert switch.get_attribute("aria-label") == f"Colours: {choice}. Change"
        is_dark = (system if choice == "as your system" else choice) == "dark"
        wanted = [(name, dark if is_dark else light) for name, light, dark in palette]
        for name, computed, expected, drawn, expected_drawn in page.evaluate(READ_COLOURS, wanted):
            assert (computed, drawn) == (expected, expected_drawn), (name, choice)
        switch.click()
