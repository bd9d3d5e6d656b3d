"""Find a Chromium for the browser tests, or install one.

`python tests/helpers/browser/chromium.py` does both and prints its path.
"""

import os
import shutil
import subprocess
import sys

NAMES = (
    "chromium-headless-shell",  # the same engine without a browser's own windows: a fifth less work
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "msedge",
)
MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"


def find_browser() -> str | None:
    """Return the path of a browser that Playwright can drive, or None.

    The first of these that exists: $CHROMIUM, a browser on PATH, Chrome on macOS, Playwright's own.
    """
    for candidate in (
        os.environ.get("CHROMIUM"),
        *map(shutil.which, NAMES),
        MAC_CHROME,
        _playwrights_browser(),
    ):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def _playwrights_browser() -> str:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return playwright.chromium.executable_path


def install() -> None:
    """Install Debian's package where this user may, and Playwright's own browser elsewhere.

    A system without the package of the headless browser gets that of the whole one.
    """
    if shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(
            ["apt-get", "update", "-qq"], check=False, env=quiet, stdout=subprocess.DEVNULL
        )
        for package in ("chromium-headless-shell", "chromium"):
            command = ["apt-get", "install", "-y", "-qq", package]
            subprocess.run(command, check=False, env=quiet, stdout=subprocess.DEVNULL)
            if find_browser():
                break
    else:
        subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)


if __name__ == "__main__":
    if not find_browser():
        print("No Chromium on this machine: installing one for the browser tests.", flush=True)
        install()
    browser = find_browser()
    if not browser:
        sys.exit(
            "The browser tests need Chromium, and it could not be installed:"
            " install it, or name one in $CHROMIUM."
        )
    print(f"Browser tests use {browser}")
