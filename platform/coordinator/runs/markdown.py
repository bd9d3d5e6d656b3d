"""The owner's notes on a run: Markdown in, safe HTML out."""

import re
from functools import lru_cache

from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt

LONGEST = 20_000  # characters
HIDING = re.compile(
    "[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)  # turns text around, or cannot be seen


def plain(text: str) -> str:
    """As it is kept: line ends as Unix has them, nothing that hides or that Postgres refuses."""
    text = HIDING.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(c for c in text if c in "\n\t" or c.isprintable()).strip()


def html(text: str) -> SafeString:
    """CommonMark and tables, without HTML, images and other people's schemes; links tell no one where they come from,
    and headings begin below those of the page."""
    return mark_safe(
        _markdown().render(plain(text))
    )  # the renderer escapes whatever is not Markdown


@lru_cache(maxsize=1)
def _markdown() -> MarkdownIt:
    markdown = (
        MarkdownIt("commonmark", {"html": False, "maxNesting": 20})
        .enable("table")
        .disable(["image", "html_block"])
    )
    markdown.disable("html_inline")

    def link(self, tokens, index, options, env) -> str:
        tokens[index].attrSet("rel", "nofollow ugc noopener noreferrer")
        return self.renderToken(tokens, index, options, env)

    def heading(self, tokens, index, options, env) -> str:
        tokens[index].tag = f"h{min(6, int(tokens[index].tag[1:]) + 2)}"
        return self.renderToken(tokens, index, options, env)

    markdown.add_render_rule("link_open", link)
    markdown.add_render_rule("heading_open", heading)
    markdown.add_render_rule("heading_close", heading)
    return markdown
