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
        "join": st.fixed_dictionaries(
            {"joined": AT, "content_digest": DIGESTS, "organiser": st.booleans()}
        ),
        "change_profile": st.fixed_dictionaries({"content_digest": DIGESTS}),
        "change_right": st.fixed_dictionaries(
            {"right": st.just("organiser"), "given": st.booleans()}
        ),
        "ban": st.fixed_dictionaries({"at": AT}),
        "unban": st.fixed_dictionaries({"lifts": st.lists(ids, max_size=4)}),
        "leave": st.fixed_dictionaries({"at": AT}),
    },
)
MACHINE = histories(
    "machine",
    {
        "enrol": st.fixed_dictionaries(
            {
                "id": st.sampled_from(IDS),
                "owner": st.sampled_from(PEOPLE),
                "enrolled": AT,
                "content_digest": DIGESTS,
            }
        ),
        "describe": st.fixed_dictionaries({"content_digest": st.one_of(st.none(), DIGESTS)}),
        "revoke": st.fixed_dictionaries({"at": AT}),
    },
)
membership = st.fixed_dictionaries(
    {
        "membership": st.sampled_from(IDS),
        "person": st.sampled_from(PEOPLE),
        "joined": AT,
        "leads": st.booleans(),
    }
)
memberships = st.fixed_dictionaries({"memberships": st.lists(st.sampled_from(IDS), max_size=3)})
TEAM = histories(
    "team",
    {
        "create": membership.map(
            lambda first: first | {"name": "Weavers", "slug": "weavers", "created": first["joined"]}
        ),
        "join": membership,
        "rename": st.fixed_dictionaries({"name": st.sampled_from(["Wool", "Weavers too"])}),
        "leave": memberships,
        "promote": memberships,
        "disband": st.just({}),
    },
)
text_ids = st.sampled_from(["a" * 16, "b" * 16])
edit = st.fixed_dictionaries(
    {
        "version": st.integers(0, 3),
        "content_digest": DIGESTS,
        "text_id": text_ids,
        "slug_digest": DIGESTS,
    }
)
join_policy = st.fixed_dictionaries(
    {"version": st.integers(0, 3), "access": st.just("anyone"), "min_memory": st.integers(0, 9)}
)


@pytest.fixture(scope="module")
def spec() -> str:
    """Return the specification of a run as JSON."""
    from coordinator.runs.spec_form import spec_from_fields

    return spec_from_fields({"seed": 1}).to_json()


def runs(spec: str) -> st.SearchStrategy[list[Fact]]:
    """Return a strategy for histories of one run."""
    from coordinator.runs.replicated.run_events import compress_manifest

    bodies = ('{"n":1}', '{"n":2}')
    signed = [{"key": "a" * 64, "body": body, "signature": "b" * 128} for body in bodies]
    create = st.fixed_dictionaries(
        {
            "owner": st.sampled_from(PEOPLE),
            "report_every": st.just(1.0),
            "quorum": st.just(1),
            "created": AT,
            "draft": edit,
            "join_policy": join_policy,
        }
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
                st.sampled_from(['{"n":1}', '{"n":2}']),
            ),
            "change_status": st.fixed_dictionaries(
                {
                    "status": st.sampled_from(
                        ["recruiting", "training", "paused", "finished", "cancelled"]
                    ),
                    "epoch": st.integers(0, 3),
                    "at": AT,
                }
            ),
            "extend": st.fixed_dictionaries({"tokens": st.integers(1, 100)}),
            "archive": st.fixed_dictionaries({"at": st.one_of(st.none(), AT)}),
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
        "announce": st.fixed_dictionaries(
            {
                "id": st.sampled_from(IDS),
                "tokens": st.integers(0, 5),
                "checksum": st.just("0" * 16),
                "size": st.just(1),
                "announced": AT,
            }
        ),
        "confirm": st.fixed_dictionaries({"holders": st.dictionaries(DIGESTS, AT, min_size=1)}),
        "delete": st.just({}),
    },
)
PAUSE = histories("pause", {"start": st.fixed_dictionaries({"at": AT}), "end": st.just({})})
LEASE = histories(
    "lease",
    {
        "acquire": st.fixed_dictionaries({"mirror": DIGESTS, "epoch": st.integers(1, 4)}),
        "done": st.fixed_dictionaries({"mirror": DIGESTS}),
    },
)
PREFERENCE = histories(
    "preference",
    {
        "set": st.fixed_dictionaries(
            {
                "kind": st.sampled_from(["run.started", "run.ended"]),
                "channel": st.sampled_from(["site", "email"]),
                "wanted": st.booleans(),
            }
        ),
        "delete": st.just({}),
    },
)
WEBHOOK = histories(
    "webhook",
    {
        "set": st.fixed_dictionaries(
            {
                "person": st.just(PEOPLE[0]),
                "created": AT,
                "active": st.booleans(),
                "content_digest": DIGESTS,
            }
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
            st.sampled_from(['{"n":1}', '{"n":2}']),
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
