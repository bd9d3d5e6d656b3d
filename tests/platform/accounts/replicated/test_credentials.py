"""Test the events of addresses and second factors: one state at all mirrors, and its rows."""

from helpers.event_histories import DIGESTS, IDS, event_id, fold_history, histories
from hypothesis import strategies as st

from barnraise.protocol.signing import digest

FACTORS = st.sampled_from(IDS[:3])


ACCESS = histories(
    "access",
    {
        "set_addresses": DIGESTS.map(lambda found: {"content_digest": found}),
        "add_factor": st.builds(
            lambda factor, type, content_digest: {
                "factor": factor,
                "type": type,
                "content_digest": content_digest,
            },
            FACTORS,
            st.sampled_from(["totp", "recovery_codes", "webauthn"]),
            DIGESTS,
        ),
        "remove_factors": st.lists(FACTORS, max_size=2).map(lambda factors: {"factors": factors}),
        "use_codes": st.builds(
            lambda factor, codes: {"factor": factor, "codes": codes},
            FACTORS,
            st.lists(st.integers(0, 9), max_size=3),
        ),
    },
)


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
