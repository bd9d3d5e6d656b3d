"""Tests of what bounds strangers: pools of what waits, buckets by name and repeated warnings."""

import logging

from hypothesis import given
from hypothesis import strategies as st

from barnraise.peering.addresses.addresses import host_of, network_of
from barnraise.peering.limits.incoming_limits import PendingPool
from barnraise.peering.limits.rate_limit import TokenBuckets
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.service_limits import Rate

LIMITS = {"address": 2, "network": 4, "all": 8}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_pool_never_exceeds_a_limit_and_holds_the_newest(arrivals):
    pool = PendingPool(LIMITS)
    waiting: dict[int, tuple[int, int]] = {}
    for item, (network, host) in enumerate(arrivals):
        dropped = pool.add(item, {"network": f"{network}", "address": f"{network}.{host}"})
        waiting[item] = (network, host)
        for oldest in dropped:
            del waiting[oldest]
        assert len(pool) == len(waiting) <= LIMITS["all"] and item in waiting
        for group in set(waiting.values()):
            assert list(waiting.values()).count(group) <= LIMITS["address"]
        networks = [of for of, _ in waiting.values()]
        assert all(networks.count(of) <= LIMITS["network"] for of in networks)


def test_pool_flood_from_one_address_drops_nobody_else():
    pool = PendingPool(LIMITS)
    assert not pool.add("honest", {"address": "1.2.3.4:5", "network": "1.2.3.0/24"})
    for number in range(100):
        dropped = pool.add(number, {"address": "6.6.6.6:6", "network": "6.6.6.0/24"})
        assert "honest" not in dropped


def test_token_buckets_limit_each_name_and_remember_a_bounded_number():
    buckets = TokenBuckets(Rate(1.0, 2.0), max_names=3)
    assert [buckets.try_consume("a", 1, 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.try_consume("b", 1, 0.0)
    assert not buckets.try_consume("a", 1, 0.5) and buckets.try_consume("a", 1, 1.1)
    for name in "cdef":
        buckets.try_consume(name, 1, 1.1)
    assert buckets.try_consume("a", 2, 1.2), "a forgotten name has a full bucket"


def test_network_of_joins_the_addresses_that_one_person_has():
    assert network_of("203.0.113.7:1") == network_of("203.0.113.250:9") == "203.0.113.0/24"
    assert network_of("[::ffff:203.0.113.7]:1") == "203.0.113.0/24"
    assert network_of("[2001:db8:1:2::1]:1") == network_of("[2001:db8:1:2:ffff::9]:7")
    assert network_of("[2001:db8:1:3::1]:1") != network_of("[2001:db8:1:2::1]:1")
    assert host_of("Example.org:80") == "example.org" == network_of("example.org:80")


def test_repeated_warning_is_logged_once_a_minute_with_its_count(caplog):
    now = [0.0]
    repeats = RepeatedWarnings(logging.getLogger("barnraise.test"), lambda: now[0])
    for _ in range(100):
        repeats.warn("refused 6.6.6.0/24", "refused %s", "abc")
    repeats.warn("refused 1.2.3.0/24", "refused %s", "def")
    now[0] = 61.0
    repeats.warn("refused 6.6.6.0/24", "refused %s", "ghi")
    assert [record.getMessage() for record in caplog.records] == [
        "refused abc",
        "refused def",
        "refused ghi (and 99 more like it before)",
    ]
