"""Read a page of the test client as a person does."""

import re


def text(answer) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def field_error(html: str, name: str) -> str:
    """Return the error at a field, or ""."""
    found = re.search(rf'<p class="error" id="id_{re.escape(name)}_error">(.*?)</p>', html)
    return found[1] if found else ""
