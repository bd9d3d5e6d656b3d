"""Test the events of addresses and second factors: one state at all mirrors, and its rows."""

import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from django.utils import timezone
from helpers.mirrors.event_histories import (
    DIGESTS,
    HISTORIES,
    IDS,
    NOW,
    assert_one_state,
    build_fact,
    event_id,
    fold,
    fold_history,
    histories,
)
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.signing import digest
from coordinator.accounts.models import User
from coordinator.accounts.replicated import credentials
from coordinator.eventlog import private_data, writer
from coordinator.eventlog.registry import DependencyMissingError
from coordinator.lib import site_identity

FACTORS = st.sampled_from(IDS[:3])


ACCESS = histories(
    "access",
    {
        "set_addresses": st.fixed_dictionaries({"content_digest": DIGESTS}),
        "add_factor": st.fixed_dictionaries(
            {
                "factor": FACTORS,
                "type": st.sampled_from(["totp", "recovery_codes", "webauthn"]),
                "content_digest": DIGESTS,
            }
        ),
        "remove_factors": st.fixed_dictionaries({"factors": st.lists(FACTORS, max_size=2)}),
        "use_codes": st.fixed_dictionaries(
            {"factor": FACTORS, "codes": st.lists(st.integers(0, 9), max_size=3)}
        ),
    },
)


@HISTORIES
@given(ACCESS, st.integers())
def test_credentials_ignore_order_and_duplicates_and_end_with_the_person(facts, seed):
    assert_one_state("access", facts, seed)
    own = [content for state in fold("access", facts)["mirrors"].values() if (content := state)]
    named = {content["addresses"] for content in own} - {None}
    assert named <= set(credentials.private_digests(fold("access", facts)))
    assert fold("access", [*facts, build_fact("access", 99, NOW - 9, "delete", {})]) is None


def test_removed_factor_is_not_restored_by_a_later_event():
    factor = {"factor": event_id(1), "type": "webauthn", "content_digest": digest("1")}
    renamed = {**factor, "content_digest": digest("2")}
    state = fold_history(
        "access",
        (1, "add_factor", factor),
        (2, "remove_factors", {"factors": [event_id(1)]}),
        (3, "add_factor", renamed),
    )
    assert state["mirrors"][""]["factors"] == {}


def test_recovery_code_used_at_two_mirrors_is_used_once():
    sheets = [
        {"factor": event_id(n), "type": "recovery_codes", "content_digest": digest(str(n))}
        for n in (1, 2)
    ]
    spent = [{"factor": event_id(1), "codes": [3, 4]}, {"factor": event_id(1), "codes": [4, 9]}]
    facts = [(1, "add_factor", sheets[0]), (2, "use_codes", spent[0]), (2, "use_codes", spent[1])]
    assert fold_history("access", *facts)["used_codes"] == {event_id(1): [3, 4, 9]}
    state = fold_history("access", *facts, (3, "add_factor", sheets[1]))
    assert list(state["mirrors"][""]["factors"]) == [event_id(2)]


# ---- rows


@pytest.fixture
def store(valkey):
    """Return a function that stores what this site recorded of a person's credentials.

    It stores addresses and factors, each (type, private data), and codes that were used.
    """

    def store_contents(user, addresses, factors=(), used=()) -> None:
        with writer.log_transaction():
            private = f"access:{user.pk}"
            content = {
                "addresses": private_data.store(private, {"addresses": addresses}),
                "factors": {
                    IDS[n]: [kind, private_data.store(private, {"created": 1.0, **secret})]
                    for n, (kind, secret) in enumerate(factors)
                },
            }
            state = {
                "mirrors": {site_identity.identity().key: content},
                "used_codes": {IDS[n]: list(used) for n in range(len(factors))},
            }
            credentials.store(str(user.pk), state)

    return store_contents


def address(email: str) -> dict:
    """Return a verified address as private data has it."""
    return {"email": email, "verified": True, "primary": True}


def test_credentials_are_stored_again_without_a_change(store, person):
    ada = person()
    rows = []
    for _ in range(2):
        sheet = ("recovery_codes", {"seed": "abc"})
        store(ada, [address("ada@example.org")], [sheet], used=[1, 3, 64, 10**6])
        rows.append([*EmailAddress.objects.values(), *Authenticator.objects.values()])
    assert rows[0] == rows[1] and len(rows[0]) == 2
    assert rows[0][1]["data"] == {"id": IDS[0], "seed": "abc", "used_mask": 0b1010}
    store(ada, [address("ada@example.org")])
    assert not Authenticator.objects.exists()


def test_address_that_somebody_else_verified_is_left_out(store, person):
    store(person("bob@example.org"), [address("bob@example.org")])
    store(person(), [address("bob@example.org"), address("ada@example.org") | {"primary": False}])
    owners = EmailAddress.objects.order_by("email").values_list("email", "user__email")
    assert list(owners) == [(each, each) for each in ("ada@example.org", "bob@example.org")]


@pytest.mark.parametrize(
    "malformed",
    [
        ("totp", {"secret": "A"}),
        ("totp", {"secret": "lower-case"}),
        ("totp", {}),
        ("recovery_codes", {"seed": ""}),
        ("recovery_codes", {"seed": "0" * 129}),
        ("webauthn", {"name": "x", "credential": {"response": {}}}),
        ("webauthn", {"name": "x", "credential": {"response": [None]}}),
    ],
)
def test_malformed_private_data_changes_no_row(store, person, malformed):
    ada = person()
    store(ada, [address("ada@example.org")])
    for email in ("Ada@example.org", "nobody", "a@b c", "@", "x" * 255 + "@example.org"):
        store(ada, [address(email)], [malformed])
        assert EmailAddress.objects.get().email == "ada@example.org"
        assert not Authenticator.objects.exists()


def test_credentials_wait_for_their_person_and_go_with_them(store, person):
    nobody = User(email="nobody@example.org")
    with pytest.raises(DependencyMissingError):
        store(nobody, [])
    ada = person()
    store(ada, [address("ada@example.org")])
    assert EmailAddress.objects.exists()
    User.objects.update(left=timezone.now())
    store(ada, [address("ada@example.org")])
    assert not EmailAddress.objects.exists()
