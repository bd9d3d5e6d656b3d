"""Test whether a command opens a page in a browser."""

import sys

import pytest

from barnraise.cli import browser
from barnraise.cli.browser import has_desktop, open_page


@pytest.mark.parametrize(
    ("environment", "system", "expected"),
    [
        ({}, "win32", True),
        ({}, "darwin", True),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"DISPLAY": ""}, "linux", False),
        ({}, "linux", False),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "10.0.0.1 22"}, "linux", False),
        ({"SSH_TTY": "/dev/ttys001"}, "darwin", False),
    ],
)
def test_browser_opens_only_where_the_person_sits(environment, system, expected):
    assert has_desktop(environment, system) is expected


def test_page_of_a_command_without_a_terminal_is_not_opened(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    assert not open_page("http://127.0.0.1:9/machines/enrol/ABCD-EFGH/")


@pytest.mark.parametrize(
    ("url", "is_page"),
    [
        ("https://barn.example.org/machines/enrol/ABCD-EFGH/", True),
        ("http://127.0.0.1:8000/", True),
        ("file:///C:/Windows/System32/calc.exe", False),
        (r"\\evil.example\share\x.exe", False),
        ("calc.exe", False),
        ("javascript:alert(1)", False),
        ("https://barn.example.org/\x1b]0;owned", False),
    ],
)
def test_enrolment_opens_no_program(monkeypatch, url, is_page):
    opened: list[str] = []
    monkeypatch.setattr(browser.webbrowser, "open", lambda page: opened.append(page) is None)
    monkeypatch.setattr(browser, "has_desktop", lambda *_: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert open_page(url) is is_page and opened == [url] * is_page
