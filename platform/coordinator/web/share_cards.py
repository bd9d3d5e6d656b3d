"""Pictures of 1200 × 630 pixels that chat programs show next to a link to a run or a person."""

import io
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from anyascii import anyascii
from django.conf import settings
from PIL import Image, ImageDraw, ImageFont

from coordinator.web import svg_art
from coordinator.web.templatetags.barnraise import load_manifest

SIZE = (1200, 630)
MARGIN = 72
PAPER, INK, MUTED, TIMBER, FAINT, GREEN = (
    *("#f1f2ec", "#1d221f", "#555c56", "#8a5a2b", "#d9d7c9", "#1f5c46"),
)
BARN_WIDTH = 430
SERIF, SANS = "besley-latin-wght-normal.woff2", "public-sans-latin-wght-normal.woff2"
SERIF_WEIGHT, SANS_WEIGHT = 700, 500
MAX_TITLE_LINES = 3
ELLIPSIS = "…"
FONT_SIGNS = "–—…·×‘’“”€œŒ"  # that the fonts have beyond Latin-1


def draw_card(title: str, facts: Sequence[str], share: float) -> bytes:
    """Draw a card as PNG: a title, up to four facts, and the barn raised to `share` (0 to 1)."""
    picture = Image.new("RGB", SIZE, PAPER)
    draw = ImageDraw.Draw(picture)
    _draw_barn(draw, share)
    draw.text((MARGIN, MARGIN), "Barnraise", GREEN, _load_font(SERIF, SERIF_WEIGHT, 34))
    width = SIZE[0] - 3 * MARGIN - BARN_WIDTH
    font = _load_font(SERIF, SERIF_WEIGHT, 62)
    y = MARGIN + 78.0
    for line in wrap_text(spell_in_latin(title), font, width, MAX_TITLE_LINES):
        draw.text((MARGIN, y), line, INK, font)
        y += 74
    y += 34
    fact_font = _load_font(SANS, SANS_WEIGHT, 34)
    for fact in facts[:4]:
        line = wrap_text(spell_in_latin(fact), fact_font, width, 1)
        draw.text((MARGIN, y), "".join(line), MUTED, fact_font)
        y += 50
    written = io.BytesIO()
    picture.save(written, "PNG", optimize=True)
    return written.getvalue()


def wrap_text(text: str, font: ImageFont.FreeTypeFont, width: float, max_lines: int) -> list[str]:
    """Break a text into lines of at most `width` pixels; what does not fit ends in "…"."""
    lines: list[str] = []
    rest = text.split()
    while rest and len(lines) < max_lines:
        taken = 1
        while taken < len(rest) and font.getlength(" ".join(rest[: taken + 1])) <= width:
            taken += 1
        lines.append(" ".join(rest[:taken]))
        rest = rest[taken:]
    if rest and lines:
        lines[-1] += ELLIPSIS
    return [_shorten_line(line, font, width) for line in lines]


def _shorten_line(line: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    if font.getlength(line) <= width:
        return line
    line = line.rstrip(ELLIPSIS)
    while line and font.getlength(line + ELLIPSIS) > width:
        line = line[:-1]
    return line + ELLIPSIS


def spell_in_latin(text: str) -> str:
    """Replace letters of other scripts by Latin ones, and leave out symbols such as emoji. Pure.

    The pages' fonts, with which cards are drawn, have the letters of Western Europe only.
    """
    spelt = (c if _is_in_fonts(c) else _transliterate(c) for c in text)
    return " ".join("".join(spelt).split()) or "Barnraise"


def _transliterate(character: str) -> str:
    is_letter_or_number = unicodedata.category(character)[0] in "LN"
    return anyascii(character) if is_letter_or_number else " "


def _is_in_fonts(character: str) -> bool:
    return character in FONT_SIGNS or " " <= character <= "~" or "\xa0" <= character <= "\xff"


def _draw_barn(draw: ImageDraw.ImageDraw, share: float) -> None:
    drawing = svg_art.timber_frame()
    scale = BARN_WIDTH / drawing.width
    left = SIZE[0] - MARGIN - BARN_WIDTH
    top = (SIZE[1] - drawing.height * scale) / 2
    raised = svg_art.count_raised(share, len(drawing.members))
    for timber in sorted(drawing.members, key=lambda timber: timber.order < raised):
        ends = (
            (left + timber.x1 * scale, top + timber.y1 * scale),
            (left + timber.x2 * scale, top + timber.y2 * scale),
        )
        is_raised = timber.order < raised
        wide = 4 if timber.slender else 7
        draw.line(ends, TIMBER if is_raised else FAINT, wide if is_raised else 2)


@lru_cache(maxsize=16)
def _load_font(name: str, weight: int, size: int) -> ImageFont.FreeTypeFont:
    """Load one of the pages' own fonts, as Vite copied it."""
    part = next(row for key, row in load_manifest().items() if key.endswith(name))
    font = ImageFont.truetype(str(Path(settings.DIST) / part["file"]), size)
    font.set_variation_by_axes([weight])
    return font
