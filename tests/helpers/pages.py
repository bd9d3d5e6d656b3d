"""What a person reads on a page."""

import re


def text(answer) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def field_error(html: str, name: str) -> str:
    """What the page says at this field, "" for nothing."""
    found = re.search(rf'<p class="error" id="id_{re.escape(name)}_error">(.*?)</p>', html)
    return found[1] if found else ""
