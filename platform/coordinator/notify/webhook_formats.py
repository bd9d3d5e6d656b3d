"""The bodies of webhook calls: our own signed JSON, or a message for a chat program. Pure."""

import json
import re
from dataclasses import dataclass
from email.header import Header
from typing import Any

from django.db.models import TextChoices
from django.utils.html import escape

MAX_DISCORD_CHARACTERS = 2000
# Characters that format text in Discord.
MARKUP = re.compile(r"([\\*_~`|>#\[\]()-])")


class WebhookFormat(TextChoices):
    """Who receives a webhook's calls."""

    STANDARD = "standard", "JSON, signed"
    SLACK = "slack", "Slack"
    DISCORD = "discord", "Discord"
    MATRIX = "matrix", "Matrix (hookshot)"
    NTFY = "ntfy", "ntfy"


@dataclass(frozen=True)
class CallContent:
    """What a call is about."""

    title: str  # one line
    text: str  # one or two sentences, or ""
    url: str  # of a page of this site, or ""
    body: dict[str, Any]  # the content of the signed JSON


def render_call(receiver: str, content: CallContent) -> tuple[bytes, dict[str, str]]:
    """Return a call's body, and its headers without the signature.

    Titles contain names that people chose: none of them formats, links or mentions anything.
    """
    match WebhookFormat(receiver):
        case WebhookFormat.SLACK:
            return _as_json({"text": _slack_text(content)})
        case WebhookFormat.DISCORD:
            return _as_json({"content": _discord_text(content), "allowed_mentions": {"parse": []}})
        case WebhookFormat.MATRIX:
            plain = "\n".join(filter(None, (content.title, content.text, content.url)))
            return _as_json({"text": plain, "html": _html_text(content)})
        case WebhookFormat.NTFY:
            headers = {"Title": Header(content.title, "utf-8").encode(linesep="")}
            if content.url:
                headers["Click"] = content.url
            text = content.text or content.title
            return text.encode(), {"Content-Type": "text/plain; charset=utf-8", **headers}
        case WebhookFormat.STANDARD:
            return _as_json(content.body)


def _as_json(message: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    body = json.dumps(message, separators=(",", ":")).encode()
    return body, {"Content-Type": "application/json"}


def _discord_text(content: CallContent) -> str:
    def plain(text: str) -> str:
        return MARKUP.sub(r"\\\1", text)

    text = "\n".join(filter(None, (f"**{plain(content.title)}**", plain(content.text))))
    text = text[: MAX_DISCORD_CHARACTERS - len(content.url) - 1]
    return f"{text}\n{content.url}".strip()


def _slack_text(content: CallContent) -> str:
    def plain(text: str) -> str:
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return re.sub(r"([*_~`])", "\u200b\\1", text)  # a space of no width ends the markup

    link = f"<{content.url}|Open>" if content.url else ""
    return "\n".join(filter(None, (f"*{plain(content.title)}*", plain(content.text), link)))


def _html_text(content: CallContent) -> str:
    parts = [f"<strong>{escape(content.title)}</strong>", escape(content.text)]
    if content.url:
        parts.append(f'<a href="{escape(content.url)}">Open</a>')
    return "<br>".join(filter(None, map(str, parts)))
