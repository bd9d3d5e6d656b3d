"""Which address a request counts as, when it says that it came through proxies."""

from ipaddress import ip_network

import pytest

from coordinator.lib.trusted_proxies import TrustedProxies

PROXIES = [ip_network("10.0.0.0/8"), ip_network("::1")]


async def resolve(sender, *forwarded, proxies=PROXIES, unix=False):
    """Return the client and the headers that the application receives."""
    received = []

    async def application(scope, receive, send):
        received.append(scope)

    headers = [(b"x-forwarded-for", text.encode()) for text in forwarded]
    headers += [(b"x-forwarded-proto", b"https"), (b"host", b"barn.example.org")]
    client = (sender, 4321) if sender else None
    scope = {"type": "http", "client": client, "headers": headers}
    await TrustedProxies(application, proxies, unix=unix)(scope, None, None)
    (scope,) = received
    return (scope["client"] or ("",))[0], {name for name, _ in scope["headers"]}


@pytest.mark.parametrize("sender", ["127.0.0.1", "203.0.113.5", "11.0.0.1"])
async def test_stranger_cannot_choose_the_address_that_limits_count(sender):
    client, headers = await resolve(sender, "198.51.100.1")
    assert client == sender
    assert headers == {b"host"}, "headers of a stranger about itself are believed"


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["203.0.113.5"], "203.0.113.5"),
        (["198.51.100.1, 203.0.113.5"], "203.0.113.5"),  # the first was written by the client
        (["198.51.100.1", "203.0.113.5, 10.0.0.9"], "203.0.113.5"),
        (["::ffff:203.0.113.5"], "203.0.113.5"),
        (["2001:db8::7"], "2001:db8::7"),
        (["203.0.113.9:5678"], "203.0.113.9"),
        (["2001:DB8::1"], "2001:db8::1"),
        (["[2001:db8::1]:443"], "2001:db8::1"),
        (['"[2001:db8::1]", 10.0.0.9:80'], "2001:db8::1"),
        (["[::ffff:203.0.113.9]:443"], "203.0.113.9"),
        (["198.51.100.1,\t203.0.113.9 ,, [::1]:80 , "], "203.0.113.9"),
        (["203.0.113.9", ""], "203.0.113.9"),
        (["203.0.113.5, unknown"], "10.0.0.1"),  # what stands before it was written by the client
        (["203.0.113.5, _hidden, 10.0.0.9"], "10.0.0.1"),
        (["203.0.113.5, nonsense"], "10.0.0.1"),
        (['"[2001:db8::1]:443"', " , ,"], "2001:db8::1"),
        (["2001:db8::1%eth0"], "2001:db8::1"),
        ([], "10.0.0.1"),
    ],
)
async def test_client_is_the_last_address_that_is_no_proxy(forwarded, client):
    found, headers = await resolve("10.0.0.1", *forwarded)
    assert found == client
    assert b"x-forwarded-proto" in headers


async def test_unix_socket_is_a_proxy_only_if_configured():
    assert (await resolve("", "203.0.113.5"))[0] == ""
    assert (await resolve("", "203.0.113.5", unix=True))[0] == "203.0.113.5"
    assert (await resolve("", "203.0.113.5:80, 10.0.0.9", unix=True))[0] == "203.0.113.5"


async def test_proxy_that_connects_by_ipv6_is_known_by_its_ipv4_address():
    assert (await resolve("::ffff:10.0.0.1", "203.0.113.5"))[0] == "203.0.113.5"
