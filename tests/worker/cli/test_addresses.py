"""Test how addresses that people paste are read."""

import pytest

from barnraise.cli.addresses import RunAddress, parse_run_address, parse_site_address
from barnraise.errors import StateError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("https://train.example.org", "https://train.example.org"),
        ("https://train.example.org/", "https://train.example.org"),
        ("https://train.example.org/runs/first-barn/?x=1#loss", "https://train.example.org"),
        (" train.example.org ", "https://train.example.org"),
        ("train.example.org:8443/runs/", "https://train.example.org:8443"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000/runs/x/", "http://localhost:8000"),
        ("192.168.1.20", "http://192.168.1.20"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("barn.local:8000", "http://barn.local:8000"),
        ("8.8.8.8", "https://8.8.8.8"),
        ("http://203.0.113.9:80", "http://203.0.113.9:80"),
    ],
)
def test_site_address_is_read_from_whatever_people_paste(text, address):
    assert parse_site_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "ftp://train.example.org", "https://", "https://host:port/", "http://a:b@host"),
        *("https://a..b.invalid", f"https://{'x' * 64}.org", f"{'x.' * 130}org", "https://*.org"),
        *(
            "https://a b",
            "http://[fe80::1%25x]",
            "https://h\x07st",
            "https://\udcff",
            "h:99999",
            "h:0",
        ),
        *("[::1", "https://evil\x1b]0;owned/", "https://evil\\x", "https://a b/"),
        "https://[link=x]a",
        *("https://[::1]x", "[v1.x]", "https://a\nb.org", "https://a\u200b.org", "http//a.org"),
        *("https:/train.example.org", "https://xn--zzzzzzz999999.org", "https://\u2603.org"),
    ],
)
def test_what_is_no_address_is_refused_with_a_sentence(text):
    with pytest.raises(StateError, match="address"):
        parse_site_address(text)


SITE = "https://train.example.org"


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("first-barn", RunAddress("first-barn")),
        (
            " 0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b ",
            RunAddress("0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"),
        ),
        (f"{SITE}/runs/first-barn/", RunAddress("first-barn", SITE)),
        ("http://127.0.0.1:8000/runs/a/extend/?a=/b/", RunAddress("a", "http://127.0.0.1:8000")),
        ("train.example.org/runs/first-barn", RunAddress("first-barn", SITE)),
        ("/runs/first-barn/", RunAddress("first-barn")),
        (f"{SITE}/runs/first-barn?invite=ab:c-_1", RunAddress("first-barn", SITE, "ab:c-_1")),
        (f"{SITE}/runs/first-barn/invited/ab:c-_1/", RunAddress("first-barn", SITE, "ab:c-_1")),
        ("夜明け", RunAddress("夜明け")),
        ("か\u3099", RunAddress("が")),
        (f"{SITE}/runs/夜明け/", RunAddress("夜明け", SITE)),
        (f"{SITE}/runs/%E5%A4%9C%E6%98%8E%E3%81%91/?invite=ab", RunAddress("夜明け", SITE, "ab")),
        ("%e5%a4%9c%E6%98%8E%E3%81%91", RunAddress("夜明け")),
    ],
)
def test_run_is_read_from_its_name_its_page_or_an_invitation(text, run):
    assert parse_run_address(text) == run


@pytest.mark.parametrize(
    "text",
    [
        *(SITE, f"{SITE}/machines/", f"{SITE}/runs/", "ftp://h/runs/x/", "https://a..b/runs/x"),
        *("\udcff", f"{SITE}/runs/a\x00b/"),
    ],
)
def test_address_without_a_run_is_refused_with_a_sentence(text):
    with pytest.raises(StateError, match="address"):
        parse_run_address(text)
