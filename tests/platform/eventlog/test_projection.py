"""Test that folds give one state for any order and any duplication of the same events.

The histories are random and include events of several mirrors at the same time. No database is
needed.
"""

import pytest
from helpers.mirrors.event_histories import (
    AT,
    DIGESTS,
    HISTORIES,
    IDS,
    ONE_O_CLOCK,
    PEOPLE,
    assert_one_state,
    event_id,
    fold,
    fold_history,
    histories,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barnraise.protocol.signing import digest
from coordinator.eventlog.registry import Fact

ids = st.integers(1, 14).map(event_id)
PERSON = histories(
    "person",
    {
        "join": st.builds(
            lambda at, content_digest, organiser: {
                "joined": at,
                "content_digest": content_digest,
                "organiser": organiser,
            },
            AT,
            DIGESTS,
            st.booleans(),
        ),
        "change_profile": DIGESTS.map(lambda found: {"content_digest": found}),
        "change_right": st.builds(
            lambda right, given: {"right": right, "given": given},
            st.just("organiser"),
            st.booleans(),
        ),
        "ban": AT.map(lambda at: {"at": at}),
        "unban": st.lists(ids, max_size=4).map(lambda lifts: {"lifts": lifts}),
        "leave": AT.map(lambda at: {"at": at}),
    },
)
MACHINE = histories(
    "machine",
    {
        "enrol": st.builds(
            lambda id, owner, at, content_digest: {
                "id": id,
                "owner": owner,
                "enrolled": at,
                "content_digest": content_digest,
            },
            st.sampled_from(IDS),
            st.sampled_from(PEOPLE),
            AT,
            DIGESTS,
        ),
        "describe": st.one_of(st.none(), DIGESTS).map(lambda found: {"content_digest": found}),
        "revoke": AT.map(lambda at: {"at": at}),
    },
)
membership = st.builds(
    lambda membership, person, at, leads: {
        "membership": membership,
        "person": person,
        "joined": at,
        "leads": leads,
    },
    st.sampled_from(IDS),
    st.sampled_from(PEOPLE),
    AT,
    st.booleans(),
)
memberships = st.lists(st.sampled_from(IDS), max_size=3).map(lambda ids: {"memberships": ids})
TEAM = histories(
    "team",
    {
        "create": membership.map(
            lambda first: first | {"name": "Weavers", "slug": "weavers", "created": first["joined"]}
        ),
        "join": membership,
        "rename": st.sampled_from(["Wool", "Weavers too"]).map(lambda name: {"name": name}),
        "leave": memberships,
        "promote": memberships,
        "disband": st.just({}),
    },
)
text_ids = st.sampled_from(["a" * 16, "b" * 16])
edit = st.builds(
    lambda n, content_digest, text_id, slug_digest: {
        "version": n,
        "content_digest": content_digest,
        "text_id": text_id,
        "slug_digest": slug_digest,
    },
    st.integers(0, 3),
    DIGESTS,
    text_ids,
    DIGESTS,
)
join_policy = st.builds(
    lambda n, memory: {"version": n, "access": "anyone", "min_memory": memory},
    st.integers(0, 3),
    st.integers(0, 9),
)


@pytest.fixture(scope="module")
def spec() -> str:
    """Return the specification of a run as JSON."""
    from coordinator.runs.spec_form import spec_from_fields

    return spec_from_fields({"seed": 1}).to_json()


def runs(spec: str) -> st.SearchStrategy[list[Fact]]:
    """Return a strategy for histories of one run."""
    from coordinator.runs.replicated.run_events import compress_manifest

    signed = [{"key": "a" * 64, "body": body, "signature": "b" * 128} for body in ("one", "two")]
    create = st.builds(
        lambda draft, policy, at, owner: {
            "owner": owner,
            "report_every": 1.0,
            "quorum": 1,
            "created": at,
            "draft": draft,
            "join_policy": policy,
        },
        edit,
        join_policy,
        AT,
        st.sampled_from(PEOPLE),
    )
    return histories(
        "run",
        {
            "create": create,
            "edit": edit,
            "set_join_policy": join_policy,
            "request_launch": st.just({}),
            "post_manifest": st.builds(
                lambda text_id, document: {
                    "text_id": text_id,
                    "compressed": compress_manifest(document),
                },
                text_ids,
                st.sampled_from(signed),
            ),
            "launch": st.builds(
                lambda at, body: {
                    "slug": "a",
                    "name": "A",
                    "spec": spec,
                    "manifest": digest(body),
                    "at": at,
                },
                AT,
                st.sampled_from(["one", "two"]),
            ),
            "change_status": st.builds(
                lambda status, epoch, at: {"status": status, "epoch": epoch, "at": at},
                st.sampled_from(["recruiting", "training", "paused", "finished", "cancelled"]),
                st.integers(0, 3),
                AT,
            ),
            "extend": st.integers(1, 100).map(lambda n: {"tokens": n}),
            "archive": st.one_of(st.none(), AT).map(lambda at: {"at": at}),
            "delete": st.just({}),
        },
    )


@HISTORIES
@given(PERSON, st.integers())
def test_person_state_ignores_order_and_duplicates(facts, seed):
    assert_one_state("person", facts, seed)


@HISTORIES
@given(MACHINE, st.integers())
def test_machine_state_ignores_order_and_duplicates(facts, seed):
    assert_one_state("machine", facts, seed)


@HISTORIES
@given(TEAM, st.integers())
def test_team_state_ignores_order_and_duplicates(facts, seed):
    assert_one_state("team", facts, seed)
    if state := fold("team", facts):
        assert any(member["leads"] for member in state["members"])
        assert len({member["person"] for member in state["members"]}) == len(state["members"])


@settings(HISTORIES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers())
def test_run_state_ignores_order_and_duplicates(spec, data, seed):
    assert_one_state("run", data.draw(runs(spec)), seed)


CHECKPOINT = histories(
    "checkpoint",
    {
        "announce": st.builds(
            lambda id, tokens, at: {
                "id": id,
                "tokens": tokens,
                "checksum": "0" * 16,
                "size": 1,
                "announced": at,
            },
            st.sampled_from(IDS),
            st.integers(0, 5),
            AT,
        ),
        "confirm": st.dictionaries(DIGESTS, AT, min_size=1).map(
            lambda holders: {"holders": holders}
        ),
        "delete": st.just({}),
    },
)
PAUSE = histories("pause", {"start": st.builds(lambda at: {"at": at}, AT), "end": st.just({})})
LEASE = histories(
    "lease",
    {
        "acquire": st.builds(
            lambda mirror, epoch: {"mirror": mirror, "epoch": epoch}, DIGESTS, st.integers(1, 4)
        ),
        "done": DIGESTS.map(lambda mirror: {"mirror": mirror}),
    },
)
PREFERENCE = histories(
    "preference",
    {
        "set": st.builds(
            lambda kind, channel, wanted: {"kind": kind, "channel": channel, "wanted": wanted},
            st.sampled_from(["run.started", "run.ended"]),
            st.sampled_from(["site", "email"]),
            st.booleans(),
        ),
        "delete": st.just({}),
    },
)
WEBHOOK = histories(
    "webhook",
    {
        "set": st.builds(
            lambda at, active, content_digest: {
                "person": PEOPLE[0],
                "created": at,
                "active": active,
                "content_digest": content_digest,
            },
            AT,
            st.booleans(),
            DIGESTS,
        ),
        "remove": st.just({}),
    },
)
VERDICT = histories(
    "verdict",
    {
        "give": st.builds(
            lambda id, at, key, body: {
                "id": id,
                "body": body,
                "signatures": {key: "a" * 128},
                "given": at,
            },
            st.sampled_from(IDS),
            AT,
            DIGESTS,
            st.sampled_from(["one", "two"]),
        )
    },
)


@HISTORIES
@given(
    st.one_of(
        [
            st.tuples(st.just("checkpoint"), CHECKPOINT),
            st.tuples(st.just("pause"), PAUSE),
            st.tuples(st.just("verdict"), VERDICT),
            st.tuples(st.just("lease"), LEASE),
            st.tuples(st.just("preference"), PREFERENCE),
            st.tuples(st.just("webhook"), WEBHOOK),
        ]
    ),
    st.integers(),
)
def test_state_of_other_types_ignores_order_and_duplicates(history, seed):
    assert_one_state(*history, seed)


# ---- rules of single types


JOIN = (0, "join", {"joined": ONE_O_CLOCK, "content_digest": digest("0")})
BAN = {"at": ONE_O_CLOCK}
LEAVE = {"at": ONE_O_CLOCK}


def test_ban_survives_an_unban_that_lifts_only_another_ban():
    unban = (9, "unban", {"lifts": [event_id(2)]})
    banned_twice = fold_history("person", JOIN, (1, "ban", BAN), (1, "ban", BAN), unban)
    assert list(banned_twice["bans"][""]) == [event_id(3)]
    assert fold_history("person", JOIN, (1, "ban", BAN), unban)["bans"] == {}
    # The mirrors' clocks differ: the unban is stamped before the ban that it lifts.
    early_unban = (1, "unban", {"lifts": [event_id(2)]})
    assert fold_history("person", JOIN, (9, "ban", BAN), early_unban)["bans"] == {}


def test_person_who_left_has_no_rights_even_if_granted_at_once():
    grant = (2, "change_right", {"right": "organiser", "given": True})
    state = fold_history("person", JOIN, (1, "leave", LEAVE), grant)
    assert state["left"] and not state["organiser"] and state["content_digests"] == {}


def draft_payload(version: int, content_digest: str) -> dict:
    """Build what an event says about a draft."""
    return {
        "version": version,
        "content_digest": content_digest,
        "text_id": "a" * 16,
        "slug_digest": digest("slug"),
    }


CREATE = (
    0,
    "create",
    {
        "owner": PEOPLE[0],
        "report_every": 1.0,
        "quorum": 1,
        "created": ONE_O_CLOCK,
        "draft": draft_payload(0, digest("0")),
        "join_policy": {"version": 0},
    },
)


def status_change(time: int, status: str, epoch: int = 0):
    """Build a change of a run's status."""
    return time, "change_status", {"status": status, "epoch": epoch, "at": ONE_O_CLOCK}


def test_status_only_climbs_until_the_owner_raises_the_epoch():
    def status(*changes: tuple[int, str, dict]) -> str:
        return fold_history("run", CREATE, *changes)["status"]

    assert status(status_change(2, "paused"), status_change(9, "training")) == "paused"
    assert status(status_change(9, "paused"), status_change(2, "training", 1)) == "training"
    assert status(status_change(1, "training", 1), status_change(2, "paused", 1)) == "paused"
    assert status(status_change(1, "cancelled"), status_change(2, "training", 5)) == "cancelled"
    assert status(status_change(1, "finished"), status_change(2, "cancelled", 5)) == "finished"


def test_drafts_count_by_version_before_the_clock():
    def edit(time: int, version: int, content: str):
        return time, "edit", draft_payload(version, digest(content))

    def draft_after(*edits: tuple[int, str, dict]) -> str:
        return fold_history("run", CREATE, *edits)["content_digest"]

    assert draft_after(edit(1, 2, "newer"), edit(9, 1, "later")) == digest("newer")
    assert draft_after(edit(1, 1, "sooner"), edit(9, 1, "later")) == digest("later")


def test_extensions_of_two_mirrors_add_up_and_the_first_launch_counts(spec):
    launch = {"slug": "a", "name": "A", "spec": spec, "manifest": digest("m"), "at": ONE_O_CLOCK}
    state = fold_history(
        "run",
        CREATE,
        (3, "launch", launch | {"name": "B"}),
        (2, "launch", launch),
        (4, "extend", {"tokens": 5}),
        (4, "extend", {"tokens": 6}),
    )
    assert (state["extra_tokens"], state["launch"]["name"], state["status"]) == (
        11,
        "A",
        "recruiting",
    )


def test_member_who_rejoined_elsewhere_stays_after_leaving_once():
    creation = {
        "membership": IDS[0],
        "person": PEOPLE[0],
        "joined": ONE_O_CLOCK,
        "leads": True,
        "name": "A",
        "slug": "a",
        "created": ONE_O_CLOCK,
    }
    join = {"membership": IDS[1], "person": PEOPLE[0], "joined": ONE_O_CLOCK, "leads": False}
    state = fold_history(
        "team", (0, "create", creation), (1, "join", join), (1, "leave", {"memberships": [IDS[0]]})
    )
    assert [(m["memberships"], m["leads"]) for m in state["members"]] == [([IDS[1]], True)]
    assert (
        fold_history("team", (0, "create", creation), (1, "leave", {"memberships": [IDS[0]]}))
        is None
    )


def test_key_enrolled_twice_belongs_to_the_first_and_stays_revoked():
    def enrol(time: int, owner: str):
        return (
            time,
            "enrol",
            {"id": IDS[0], "owner": owner, "enrolled": ONE_O_CLOCK, "content_digest": digest("0")},
        )

    state = fold_history(
        "machine", enrol(2, PEOPLE[1]), enrol(1, PEOPLE[0]), (0, "revoke", {"at": ONE_O_CLOCK})
    )
    assert state["owner"] == PEOPLE[0] and state["revoked"]
