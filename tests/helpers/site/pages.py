"""Read pages that the test client received."""

import re

# The error of a new run; the field's help text says nearly the same.
WIDTH_ERROR = re.compile(r"[Tt]he width \(\d+\) must be divisible by the heads")


def text(answer) -> str:
    """Return the text of a page without its markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def field_error(html: str, name: str) -> str:
    """Return the error at a form's field, or ""."""
    match = re.search(rf'<p class="error" id="id_{re.escape(name)}_error">(.*?)</p>', html)
    return match[1] if match else ""
