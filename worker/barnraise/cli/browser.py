"""Open a page in the browser of the person at this computer."""

import os
import sys
import webbrowser
from collections.abc import Mapping
from urllib.parse import urlsplit


def open_page(url: str) -> bool:
    """Open a page if a person sits at this computer, and return whether a browser opens it.

    Only an address of the web is opened: of others, Windows starts the program that they name.
    """
    is_web = url.isprintable() and urlsplit(url).scheme in ("http", "https")
    if not (is_web and sys.stdout.isatty() and has_desktop(os.environ, sys.platform)):
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False


def has_desktop(environment: Mapping[str, str], system: str) -> bool:
    """Return whether a browser would open where the person is; `system` as `sys.platform`. Pure."""
    if "SSH_CONNECTION" in environment or "SSH_TTY" in environment:
        return False
    if system in ("win32", "darwin"):
        return True
    return bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))
