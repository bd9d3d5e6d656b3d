"""Which addresses of a machine other machines may dial."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.ip_addresses import is_public_ip, parse_ip
from coordinator.fleet.peer_addresses import shareable_addresses

HOME, ELSEWHERE, VICTIM = "8.8.4.4", "9.9.9.9", "1.1.1.1"
HOME_6, NEIGHBOUR_6 = "2600:1:2:3::5", "2600:1:2:3:abcd::9"


@pytest.mark.parametrize(
    ("announced", "source", "receiver", "passed_on"),
    [
        ([f"{VICTIM}:53"], HOME, ELSEWHERE, []),  # a stranger's computer
        ([f"{VICTIM}:53"], HOME, HOME, []),
        ([f"[::ffff:{VICTIM}]:53"], HOME, ELSEWHERE, []),
        (["[64:ff9b::101:101]:53", "[2002:101:101::]:53"], HOME, ELSEWHERE, []),
        (["victim.example.org:53"], HOME, HOME, []),  # a name that leads anywhere later
        (["224.0.0.1:53", "0.0.0.0:53", "255.255.255.255:1"], "", ELSEWHERE, []),
        ([f"{HOME}:0", f"{HOME}:99999", f"{HOME}:"], HOME, ELSEWHERE, []),
        ([f"{HOME}:4000", f"{VICTIM}:53"], HOME, ELSEWHERE, [f"{HOME}:4000"]),
        ([f"[{NEIGHBOUR_6}]:4000"], HOME_6, ELSEWHERE, [f"[{NEIGHBOUR_6}]:4000"]),
        (["192.168.1.5:4000"], HOME, ELSEWHERE, []),  # another network's 192.168.1.5
        (["192.168.1.5:4000"], HOME, HOME, ["192.168.1.5:4000"]),
        (["192.168.1.5:4000"], "192.168.1.5", "127.0.0.1", ["192.168.1.5:4000"]),
        (["127.0.0.1:4000"], "127.0.0.1", "127.0.0.1", ["127.0.0.1:4000"]),
        (["127.0.0.1:4000"], "127.0.0.1", HOME, []),
        (["192.168.1.5:4000"], "", "", []),
    ],
)
def test_only_proven_addresses_are_passed_on(announced, source, receiver, passed_on):
    assert shareable_addresses(announced, source, receiver) == passed_on


@pytest.mark.parametrize(
    ("relay", "relays", "is_passed_on"),
    [
        ("https://relay.example.org/", ["https://relay.example.org"], True),
        ("https://RELAY.example.org./", ["https://relay.example.org"], True),
        ("https://euc1-1.relay.n0.iroh.link./", ["default"], True),
        ("https://relay.n0.iroh.link.example.org/", ["default"], False),
        ("https://victim.example.org/", ["default", "https://relay.example.org"], False),
        ("https://relay.example.org/", [], False),
        ("http://relay.example.org/", ["https://relay.example.org"], False),
    ],
)
def test_only_relays_of_the_mirror_list_are_passed_on(relay, relays, is_passed_on):
    passed_on = shareable_addresses([relay], HOME, ELSEWHERE, relays)
    assert passed_on == ([relay] if is_passed_on else [])


ip_texts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(st.lists(ip_texts, max_size=8), ip_texts, ip_texts)
def test_machine_cannot_aim_others_at_a_network_it_does_not_send_from(hosts, source, receiver):
    addresses = [f"[{host}]:4000" if ":" in host else f"{host}:4000" for host in hosts]
    for address in shareable_addresses(addresses, source, receiver):
        ip = parse_ip(address.rpartition(":")[0].strip("[]"))
        if is_public_ip(ip):
            own = parse_ip(source)
            assert ip == own or (ip.version == own.version == 6 and ip.packed[:8] == own.packed[:8])
