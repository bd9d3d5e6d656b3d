"""Test the notes of a run: Markdown is rendered, HTML and scripts are not."""

import re

import pytest
from django.test import Client

from coordinator.runs import markdown
from coordinator.runs.join_policy import JoinPolicy

pytestmark = pytest.mark.django_db


def test_notes_are_rendered_from_markdown():
    shown = markdown.render_html(
        "# Why\n\nA *small* [start](https://example.org/?a=1&b=2).\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |"
    )
    assert "<h3>Why</h3>" in shown and "<em>small</em>" in shown and "<table>" in shown
    assert 'rel="nofollow ugc noopener noreferrer"' in shown and "&amp;b=2" in shown
    assert markdown.render_html("") == ""


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "![x](https://evil.example/pixel.png)",
        "[click](javascript:alert(1))",
        "[click](JaVaScRiPt:alert(1))",
        "[click](data:text/html;base64,PHNjcmlwdD4=)",
        "[click](vbscript:x)",
        "<javascript:alert(1)>",
        '[a](https://example.org "onmouseover=alert(1)")',
        '[a](<https://example.org/" onclick="alert(1)>)',
        "<a href='javascript:alert(1)'>x</a>",
        '```"><script>alert(1)</script>\nx\n```',
        "&lt;script&gt;",
        "[x]: javascript:alert(1)\n\n[x]",
        ">" * 500 + "x",
        "[" * 5000,
        "*" * 5000,
    ],
)
def test_hostile_notes_are_rendered_as_text(hostile):
    shown = markdown.render_html(hostile)
    assert not re.search(
        r"<(?!/?(p|em|strong|a|code|pre|blockquote|h[1-6]|ul|ol|li|hr|br|table|t[a-z]+)\b)", shown
    ), shown
    for tag in re.findall(r"<[^>]+>", shown):
        names = re.findall(r'\s([\w-]+)="', tag)
        assert set(names) <= {"href", "rel", "title", "class", "start", "style"}, tag
        assert not re.search(r'href="\s*(javascript|data|vbscript)', tag, re.I), tag


def test_notes_lose_bidirectional_and_hidden_characters_not_emoji():
    assert (
        markdown.clean_markdown("a\u202eb\u200bc\0d\r\ne 🛖 \N{HEBREW LETTER ALEF}")
        == "abcd\ne 🛖 \N{HEBREW LETTER ALEF}"
    )


def test_run_page_shows_notes_to_visitors(person, launched_run):
    run, _ = launched_run(person(), join_policy=JoinPolicy(notes="Bring <b>coffee</b> & *cake*"))
    page = Client().get(f"/runs/{run.slug}/").content.decode()
    assert "Bring &lt;b&gt;coffee&lt;/b&gt; &amp; <em>cake</em>" in page


def test_notes_that_stand_for_a_huge_table_are_shown_as_typed():
    """Twenty kilobytes of notes, rendered for every visitor, would be pages of megabytes."""
    wide = "|a" * 2000 + "\n" + "|-" * 2000 + "\n" + "|<b>\n" * 2400
    shown = markdown.render_html(wide)
    assert shown.startswith("<pre>|a|a") and "&lt;b&gt;" in shown
    assert len(shown) < 5 * markdown.MAX_CHARACTERS
    assert markdown.render_html(wide) is shown, "the next visitor waits for nothing"
