"""Finds a Chromium for the browser tests, or installs one. `python tests/chromium.py` prints where it is."""

import os
import shutil
import subprocess
import sys

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "msedge",
)
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"


def found() -> str | None:
    """The path of a browser on this machine that Playwright can drive: $CHROMIUM, one on PATH, or Playwright's own."""
    for candidate in (os.environ.get("CHROMIUM"), *map(shutil.which, NAMES), MAC, _playwrights()):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def _playwrights() -> str:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return playwright.chromium.executable_path


def install() -> None:
    """Debian's package where we are root there, Playwright's own download elsewhere."""
    if shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(
            ["apt-get", "update", "-qq"], check=False, env=quiet, stdout=subprocess.DEVNULL
        )
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "chromium"],
            check=False,
            env=quiet,
            stdout=subprocess.DEVNULL,
        )
    else:
        subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)


if __name__ == "__main__":
    if not found():
        print("No Chromium on this machine: installing one for the browser tests.", flush=True)
        install()
    browser = found()
    if not browser:
        sys.exit(
            "The browser tests need Chromium, and it could not be installed: install it, or name one in $CHROMIUM."
        )
    print(f"Browser tests use {browser}")
