"""Test which proxy the variables of the environment name for an address, in all spellings."""

import pytest

from barnraise.errors import StateError
from barnraise.protocol.proxies import choose_proxy, parse_proxy

PROXY = "http://10.0.0.9:3128"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def environment(monkeypatch):
    """Return what sets variables of an environment that names no proxy."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    ("variables", "by_http", "by_https"),
    [
        ({}, None, None),
        ({"HTTP_PROXY": PROXY}, "HTTP_PROXY", None),
        ({"https_proxy": PROXY}, None, "https_proxy"),
        ({"ALL_PROXY": PROXY, "https_proxy": PROXY}, "ALL_PROXY", "https_proxy"),
        ({"all_proxy": PROXY, "ALL_PROXY": "rubbish://"}, "all_proxy", "all_proxy"),
        ({"ALL_PROXY": PROXY, "all_proxy": ""}, None, None),
        ({"HTTP_PROXY": f' "{PROXY}" '}, "HTTP_PROXY", None),
        ({"HTTP_PROXY": " "}, None, None),
    ],
)
def test_proxy_is_that_of_the_variable_that_counts(environment, variables, by_http, by_https):
    environment(**variables)
    for url, source in (("http://site.example/a", by_http), ("https://site.example/a", by_https)):
        proxy = choose_proxy(url)
        assert (proxy and (proxy.source, proxy.url)) == (source and (source, PROXY))


@pytest.mark.parametrize(
    ("no_proxy", "direct", "proxied"),
    [
        ("[::1],127.0.0.1", ["[::1]:8000", "127.0.0.1:9"], ["127.0.0.2", "[::2]"]),
        ("::1 , 127.0.0.0/8", ["[::1]", "127.3.2.1", "[::ffff:127.0.0.1]"], ["128.0.0.1"]),
        ("[fd00::]/8;10.0.0.0/255.0.0.0", ["[fd12::1]", "10.1.2.3"], ["[fe00::1]", "11.0.0.1"]),
        ("::ffff:10.0.0.0/104", ["10.1.2.3", "[::ffff:10.1.2.3]"], ["11.0.0.1"]),
        ("10.0.0.5/8 fd00::7/16", ["10.1.2.3", "[fd00::1]"], ["11.0.0.1", "[fe00::1]"]),
        ("site.example", ["site.example", "a.SITE.example."], ["mysite.example", "example"]),
        (".site.example", ["site.example", "a.site.example"], ["mysite.example"]),
        ("*.site.example", ["a.site.example"], ["mysite.example"]),
        ("site.example:8000", ["site.example:8000"], ["site.example", "site.example:80"]),
        ("site.example:80 [::1]:80", ["site.example", "[::1]"], ["[::1]:81"]),
        ("https://site.example/", ["site.example"], ["other.example"]),
        ("192.168.*", ["192.168.7.7"], ["192.169.7.7"]),
        ("bücher.example", ["xn--bcher-kva.example"], ["bucher.example"]),
        ("*", ["site.example", "10.0.0.1", "[::1]"], []),
        (" , ", [], ["site.example"]),
        ("'localhost'", ["localhost"], ["site.example"]),
    ],
)
def test_hosts_of_no_proxy_are_reached_directly(environment, no_proxy, direct, proxied):
    for name in ("NO_PROXY", "no_proxy"):
        environment(**{"ALL_PROXY": PROXY, name: no_proxy})
        assert [host for host in direct if choose_proxy(f"http://{host}/") is not None] == []
        assert [host for host in proxied if choose_proxy(f"http://{host}/") is None] == []


@pytest.mark.parametrize(
    "entry",
    [
        *("[::1", "::g", "host:port", "10.0.0.0/99", "127.1", "a..b", "a/b", "http://", ".", "!!"),
        *("<local>", "x:y:z", "ada:geheim@"),
    ],
)
def test_entry_that_is_no_host_is_left_out_with_a_sentence(environment, caplog, entry):
    environment(ALL_PROXY=PROXY, NO_PROXY=f"{entry} site.example")
    assert choose_proxy("https://site.example") is None and choose_proxy("http://b.example")
    choose_proxy("https://again.example")
    (record,) = caplog.records
    assert "NO_PROXY: '" in record.message and "is left out" in record.message
    assert "geheim" not in record.message


@pytest.mark.parametrize(
    ("value", "url", "auth"),
    [
        ("10.0.0.9:3128", "http://10.0.0.9:3128", None),
        ("proxy.example", "http://proxy.example:80", None),
        ("HTTPS://Proxy.example/", "https://proxy.example:443", None),
        ("socks://[::1]", "socks5://[::1]:1080", None),
        ("socks5h://ada:g%40h@p:1", "socks5h://p:1", ("ada", "g@h")),
        ("http://ada:9/g#h@i?@p:1", "http://p:1", ("ada", "9/g#h@i?")),
        ("http://ada@p", "http://p:80", ("ada", "")),
    ],
)
def test_address_of_a_proxy_is_read_as_people_write_it(value, url, auth):
    proxy = parse_proxy("HTTP_PROXY", value)
    assert proxy is not None and (proxy.url, proxy.auth) == (url, auth)
    assert str(proxy) == f"the proxy {url} of HTTP_PROXY" and "g@h" not in repr(proxy)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "socks4://p:1",
            "ftp://ada:geheim@p",
            "http://",
            "http://:80",
            "http://ada:geheim@p:port",
        ),
        *("p:99999", "http://a b:1", "ada:geheim://x@p", "http://[::1", "http://*", "!"),
        *(
            "http://a..b:1",
            f"http://{'p' * 64}.example",
            "http://p:0",
            "http://ada:geheim@[::1]x:1",
            "http:/proxy.example:3128",
            "ada:geheim",
            "http://ada:geheim",
        ),
    ],
)
def test_what_is_no_proxy_is_refused_without_its_password(value):
    with pytest.raises(StateError, match=r"HTTP_PROXY names '.*', which is no proxy") as refusal:
        parse_proxy("HTTP_PROXY", value)
    assert "geheim" not in str(refusal.value)
