"""The owner's notes on a run: Markdown in, safe HTML out. Pure."""

import re
from functools import lru_cache
from typing import Any

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt

MAX_CHARACTERS = 20_000
MAX_HTML_CHARACTERS = 250_000
# Characters that are invisible, or reverse the direction of the text.
HIDING = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


def clean_markdown(text: str) -> str:
    """Normalise line ends, and remove characters that are invisible or that Postgres refuses."""
    text = HIDING.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(c for c in text if c in "\n\t" or c.isprintable()).strip()


@lru_cache(maxsize=64)
def render_html(text: str) -> SafeString:
    """Render CommonMark and tables, without HTML, images or other URL schemes.

    Links send no referrer, and headings begin below those of the page. Every visitor of a page has
    its notes rendered, and a table of a few kilobytes may stand for millions of cells: results are
    cached, and notes whose HTML is far larger than any text are shown as they were typed.
    """
    cleaned = clean_markdown(text)
    # The renderer escapes everything that is not Markdown.
    html = _create_renderer().render(cleaned)
    if len(html) > MAX_HTML_CHARACTERS:
        html = f"<pre>{escape(cleaned)}</pre>"
    return mark_safe(html)


def render_document(text: str) -> SafeString:
    """Render a document of this version, of any length."""
    return mark_safe(_create_renderer().render(text))


@lru_cache(maxsize=1)
def _create_renderer() -> MarkdownIt:
    markdown = (
        MarkdownIt("commonmark", {"html": False, "maxNesting": 20})
        .enable("table")
        .disable(["image", "html_block"])
    )
    markdown.disable("html_inline")

    def link(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        tokens[index].attrSet("rel", "nofollow ugc noopener noreferrer")
        return self.renderToken(tokens, index, options, env)

    def heading(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        tokens[index].tag = f"h{min(6, int(tokens[index].tag[1:]) + 2)}"
        return self.renderToken(tokens, index, options, env)

    markdown.add_render_rule("link_open", link)
    markdown.add_render_rule("heading_open", heading)
    markdown.add_render_rule("heading_close", heading)
    return markdown
