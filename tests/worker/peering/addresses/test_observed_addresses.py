"""Test which reports of this machine's own address are believed: see `observed_addresses`."""

import pytest

from barnraise.peering.addresses.observed_addresses import (
    MAX_OBSERVATIONS,
    OBSERVATION_SECONDS,
    ObservedAddresses,
)

PUBLIC = "5.9.1.1:45555"


@pytest.mark.parametrize(
    ("reports", "seen_by_site", "confirmed"),
    [
        ([("1", PUBLIC)], "", []),
        ([("1", PUBLIC), ("2", PUBLIC)], "", [PUBLIC]),
        ([("1", PUBLIC), ("1", PUBLIC)], "", []),  # by two machines of one person
        ([], "5.9.1.1", []),
        ([("1", PUBLIC), ("2", "5.9.1.2:45555")], "5.9.1.1", [PUBLIC]),
        ([("1", "[2a01:db9:0::5]:45555")], "2A01:0DB9::0005", ["[2a01:db9::5]:45555"]),
    ],
)
def test_address_is_believed_if_two_people_or_one_and_the_site_report_it(
    reports: list[tuple[str, str]], seen_by_site: str, confirmed: list[str]
) -> None:
    observed = ObservedAddresses()
    observed.on_site_report(seen_by_site)
    for n, (person, address) in enumerate(reports):
        observed.on_report(f"peer {n}", person, address)
    assert observed.confirmed(0.0) == confirmed
    assert observed.confirmed(0.0, own_addresses=confirmed) == []


def test_reports_of_no_usable_address_are_ignored() -> None:
    observed = ObservedAddresses()
    for text in ("", "relay", "5.9.1.1", "5.9.1.1:0", "5.9.1.1:70000", "0.0.0.0:5", "224.0.0.1:5"):
        for peer in ("1", "2"):
            observed.on_report(peer, peer, text)
    for host in ("", "unix", "::", "127.0.0.1"):
        observed.on_site_report(host)
    assert observed.observations(0.0) == ()
    assert observed.confirmed(0.0) == []


def test_report_of_a_peer_that_left_counts_for_a_while() -> None:
    observed = ObservedAddresses()
    observed.on_report("peer 1", "person 1", PUBLIC)
    observed.on_report("peer 2", "person 2", PUBLIC)
    observed.on_disconnected("peer 2", 10.0)
    assert observed.confirmed(10.0 + OBSERVATION_SECONDS - 1) == [PUBLIC]
    assert observed.confirmed(10.0 + OBSERVATION_SECONDS) == []


def test_newer_report_of_a_peer_replaces_its_older_one() -> None:
    observed = ObservedAddresses()
    observed.on_report("peer 1", "person 1", PUBLIC)
    observed.on_report("peer 1", "person 1", "5.9.1.1:9")
    assert [each.address for each in observed.observations(0.0)] == ["5.9.1.1:9"]


def test_any_number_of_reporters_takes_bounded_memory() -> None:
    observed = ObservedAddresses()
    for n in range(3 * MAX_OBSERVATIONS):
        observed.on_report(f"peer {n}", f"person {n}", PUBLIC)
        observed.on_disconnected(f"peer {n}", 0.0)
    assert len(observed.observations(0.0)) == MAX_OBSERVATIONS
