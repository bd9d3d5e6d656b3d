"""Open pages with the test client, and read what it received."""

import re

from django.test import Client

# The error of a new run; the field's help text says nearly the same.
WIDTH_ERROR = re.compile(r"[Tt]he width \(\d+\) must be divisible by the heads")


def open_client(person) -> Client:
    """Return a client that is signed in as a person."""
    client = Client()
    client.force_login(person)
    return client


def text(answer) -> str:
    """Return the text of a page without its markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def field_error(html: str, name: str) -> str:
    """Return the error at a form's field, or ""."""
    match = re.search(rf'<p class="error" id="id_{re.escape(name)}_error">(.*?)</p>', html)
    return match[1] if match else ""
