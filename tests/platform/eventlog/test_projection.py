"""Test that folds give one state for any order and any duplication of the same events.

The histories are random and include events of several mirrors at the same time. No database is
needed.
"""

from random import Random

import pytest
from helpers.effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uuid6 import UUID

from barnraise.protocol.signing import digest
from coordinator.eventlog import hlc, registry
from coordinator.eventlog.registry import Fact

NOW = 1_700_000_000
HISTORIES = settings(max_examples=examples(100, 1500), deadline=None)
PEOPLE = [f"01890000-0000-7000-8000-{n:012x}" for n in range(4)]
IDS = [f"01890000-0000-7000-9000-{n:012x}" for n in range(8)]
AT = st.integers(0, 5).map(lambda n: f"2026-01-01T00:00:{n:02d}.000001Z")
DIGESTS = st.sampled_from([digest(str(n)) for n in range(4)])


def event_uuid(n: int) -> UUID:
    """Return the id of the n-th event of a history."""
    return UUID(int=n << 64 | 7 << 76 | 2 << 62)


def event_id(n: int) -> str:
    """Return the id of the n-th event of a history as payloads contain it."""
    return str(event_uuid(n))


def build_fact(type_name: str, n: int, time: int, action: str, payload: dict, *mirror: str) -> Fact:
    """Build the n-th fact of a history, stamped at `time`; of equal stamps the id decides."""
    payload_type = registry.aggregate_types()[type_name].payload_types[action]
    return Fact(
        hlc=time << hlc.COUNTER_BITS,
        id=event_uuid(n),
        digest=digest(str(n)),
        action=action,
        payload=payload_type.model_validate(payload),
        mirror="".join(mirror),
    )


def histories(
    type_name: str, payloads: dict[str, st.SearchStrategy]
) -> st.SearchStrategy[list[Fact]]:
    """Return a strategy for histories of one aggregate.

    Args:
        type_name: The aggregate type.
        payloads: Action → strategy for its payload.
    """
    change = st.one_of(
        [st.tuples(st.just(action), payload) for action, payload in payloads.items()]
    )
    timed_changes = st.lists(st.tuples(st.integers(NOW, NOW + 6), change), min_size=1, max_size=14)
    return timed_changes.map(
        lambda history: [
            build_fact(type_name, n, time, action, payload, f"{n % 2}")  # of two mirrors
            for n, (time, (action, payload)) in enumerate(history, 1)
        ]
    )


def fold(type_name: str, facts: list[Fact]):
    """Fold facts as the projection does: each once, and sorted."""
    unique = {item.digest: item for item in facts}.values()
    return registry.aggregate_types()[type_name].fold(
        sorted(unique, key=lambda item: item.order_key)
    )


def assert_one_state(type_name: str, facts: list[Fact], seed: int) -> None:
    """Check that shuffled and repeated facts fold to the same state."""
    random = Random(seed)
    received = facts + random.choices(facts, k=random.randint(0, len(facts)))
    random.shuffle(received)
    assert fold(type_name, received) == fold(type_name, facts)


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


receipt = st.builds(
    lambda day, first, more, rate, witness: {
        "day": f"2026-01-0{day}",
        "first": first,
        "last": first + more,
        "tokens": (more + 1) * rate,
        "witness": witness,
    },
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 9),
    st.integers(0, 90),
    st.none() | DIGESTS,
)


@HISTORIES
@given(histories("credit", {"receipt": receipt}), st.integers())
def test_receipts_sum_to_the_union_of_their_ranges(facts, seed):
    assert_one_state("credit", facts, seed)
    days = fold("credit", facts)["days"].values()
    covered = {seq for item in facts for seq in range(item.payload.first, item.payload.last + 1)}
    highest_rate = max(
        item.payload.tokens / (item.payload.last - item.payload.first + 1) for item in facts
    )
    assert sum(day["tokens"] for day in days) <= highest_rate * len(covered)
    assert max(day["last"] for day in days) == max(covered)


@HISTORIES
@given(
    histories(
        "credit",
        {
            "receipt": receipt.map(
                lambda payload: payload | {"tokens": 7 * (payload["last"] - payload["first"] + 1)}
            )
        },
    )
)
def test_receipts_that_agree_count_each_token_once(facts):
    covered = {seq for item in facts for seq in range(item.payload.first, item.payload.last + 1)}
    assert sum(day["tokens"] for day in fold("credit", facts)["days"].values()) == 7 * len(covered)


def total_tokens(seq: int) -> int:
    """Return the tokens of an author's updates up to number `seq`, which differ in size."""
    return sum(1 + 37 * n % 91 for n in range(1, seq + 1))


@HISTORIES
@given(
    histories(
        "credit",
        {
            "receipt": receipt.map(
                lambda payload: (
                    payload
                    | {
                        "tokens": (
                            total_tokens(payload["last"]) - total_tokens(payload["first"] - 1)
                        ),
                        "total": total_tokens(payload["last"]),
                    }
                )
            )
        },
    )
)
def test_overlapping_ranges_count_exactly_if_the_author_signed_totals(facts):
    covered = {seq for item in facts for seq in range(item.payload.first, item.payload.last + 1)}
    exact = sum(total_tokens(seq) - total_tokens(seq - 1) for seq in covered)
    assert sum(day["tokens"] for day in fold("credit", facts)["days"].values()) == exact


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
            st.tuples(st.just("access"), ACCESS),
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


def fold_history(type_name: str, *history: tuple[int, str, dict]):
    """Fold a history of (time, action, payload), whose events are numbered from 1."""
    facts = [
        build_fact(type_name, n, NOW + time, action, payload)
        for n, (time, action, payload) in enumerate(history, 1)
    ]
    return fold(type_name, facts)


ONE_O_CLOCK = "2026-01-01T01:00:00Z"
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
