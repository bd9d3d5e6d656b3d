"""Folds: whatever happened at several mirrors at once, and in whatever order and however often it is heard, one state
follows. Thousands of histories of each kind, without a database; then some through all of it, with rows."""

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
HISTORIES = settings(max_examples=examples(200, 1500), deadline=None)
PEOPLE = [f"01890000-0000-7000-8000-{n:012x}" for n in range(4)]
PLACES = [f"01890000-0000-7000-9000-{n:012x}" for n in range(8)]
AT = st.integers(0, 5).map(lambda n: f"2026-01-01T00:00:{n:02d}.000001Z")
DIGESTS = st.sampled_from([digest(str(n)) for n in range(4)])


def fact(kind: str, n: int, time: int, what: str, said: dict) -> Fact:
    """The n-th of a history, stamped at `time`: several may bear one stamp, and then the id decides."""
    shape = registry.aggregate_types()[kind].payload_types[what].model_validate(said)
    return Fact(
        time << hlc.COUNTER_BITS, UUID(int=n << 64 | 7 << 76 | 2 << 62), digest(str(n)), what, shape
    )


def histories(kind: str, what: dict[str, st.SearchStrategy]) -> st.SearchStrategy[list[Fact]]:
    one = st.one_of([st.tuples(st.just(name), said) for name, said in what.items()])
    numbered = st.lists(st.tuples(st.integers(NOW, NOW + 6), one), min_size=1, max_size=14)
    return numbered.map(
        lambda all: [
            fact(kind, n, time, name, said) for n, (time, (name, said)) in enumerate(all, 1)
        ]
    )


def folded(kind: str, facts: list[Fact]):
    """As `state.folded` does, of facts as they came in."""
    known = {each.digest: each for each in facts}.values()
    return registry.aggregate_types()[kind].fold(sorted(known, key=lambda each: each.order_key))


def one_state(kind: str, facts: list[Fact], seed: int) -> None:
    """Any order, any duplication."""
    chance = Random(seed)
    heard = facts + chance.choices(facts, k=chance.randint(0, len(facts)))
    chance.shuffle(heard)
    assert folded(kind, heard) == folded(kind, facts)


ids = st.integers(1, 14).map(lambda n: str(UUID(int=n << 64 | 7 << 76 | 2 << 62)))
PERSON = histories(
    "person",
    {
        "join": st.builds(lambda at, about, staff: {"joined": at, "about": about, "is_staff": staff}, AT, DIGESTS,
                          st.booleans()),
        "about": DIGESTS.map(lambda about: {"about": about}),
        "grant": st.builds(lambda right, given: {"right": right, "given": given},
                           st.sampled_from(["organiser", "is_staff"]), st.booleans()),
        "ban": AT.map(lambda at: {"at": at}),
        "unban": st.lists(ids, max_size=4).map(lambda lifts: {"lifts": lifts}),
        "leave": AT.map(lambda at: {"at": at}),
    },
)  # fmt: skip
MACHINE = histories(
    "machine",
    {
        "enrol": st.builds(lambda id, owner, at, about: {"id": id, "owner": owner, "enrolled": at, "about": about},
                           st.sampled_from(PLACES), st.sampled_from(PEOPLE), AT, DIGESTS),
        "about": st.one_of(st.none(), DIGESTS).map(lambda about: {"about": about}),
        "revoke": AT.map(lambda at: {"at": at}),
    },
)  # fmt: skip
place = st.builds(
    lambda place, person, at, leads: {"place": place, "person": person, "joined": at, "leads": leads},
    st.sampled_from(PLACES), st.sampled_from(PEOPLE), AT, st.booleans(),
)  # fmt: skip
places = st.lists(st.sampled_from(PLACES), max_size=3).map(lambda places: {"places": places})
TEAM = histories(
    "team",
    {
        "found": place.map(
            lambda first: first | {"name": "Weavers", "slug": "weavers", "created": first["joined"]}
        ),
        "join": place,
        "rename": st.sampled_from(["Wool", "Weavers too"]).map(lambda name: {"name": name}),
        "part": places,
        "promote": places,
        "disband": st.just({}),
    },
)
tokens = st.sampled_from(["a" * 16, "b" * 16])
edit = st.builds(
    lambda n, about, text: {"version": n, "about": about, "text": text},
    st.integers(0, 3),
    DIGESTS,
    tokens,
)
terms = st.builds(
    lambda n, memory: {"version": n, "access": "anyone", "least_memory": memory},
    st.integers(0, 3),
    st.integers(0, 9),
)


@pytest.fixture(scope="module")
def spec() -> str:
    from coordinator.runs.spec_form import spec_from_fields

    return spec_from_fields({"seed": 1}).to_json()


def runs(spec: str) -> st.SearchStrategy[list[Fact]]:
    from coordinator.runs.replicated.run_events import pack_manifest

    signed = [{"key": "a" * 64, "body": body, "signature": "b" * 128} for body in ("one", "two")]
    create = st.builds(
        lambda settings, terms, at, owner: {
            "word": digest("word"), "owner": owner, "report_every": 1.0, "quorum": 1, "created": at,
            "settings": settings, "terms": terms,
        },
        edit, terms, AT, st.sampled_from(PEOPLE),
    )  # fmt: skip
    return histories(
        "run",
        {
            "create": create,
            "edit": edit,
            "arrange": terms,
            "request": st.just({}),
            "manifest": st.builds(
                lambda text, each: {"text": text, "packed": pack_manifest(each)}, tokens, st.sampled_from(signed)
            ),
            "launch": st.builds(
                lambda at, body: {"slug": "a", "name": "A", "spec": spec, "manifest": digest(body), "at": at},
                AT, st.sampled_from(["one", "two"]),
            ),
            "becomes": st.builds(
                lambda status, epoch, at: {"status": status, "epoch": epoch, "at": at},
                st.sampled_from(["recruiting", "training", "paused", "finished", "cancelled"]), st.integers(0, 3), AT,
            ),
            "extend": st.integers(1, 100).map(lambda n: {"tokens": n}),
            "archive": st.one_of(st.none(), AT).map(lambda at: {"at": at}),
            "forget": st.just({}),
        },
    )  # fmt: skip


@HISTORIES
@given(PERSON, st.integers())
def test_any_order_and_any_duplication_make_one_person(facts, seed):
    one_state("person", facts, seed)


@HISTORIES
@given(MACHINE, st.integers())
def test_any_order_and_any_duplication_make_one_machine(facts, seed):
    one_state("machine", facts, seed)


@HISTORIES
@given(TEAM, st.integers())
def test_any_order_and_any_duplication_make_one_team(facts, seed):
    one_state("team", facts, seed)
    if state := folded("team", facts):
        assert any(member["leads"] for member in state["members"])
        assert len({member["person"] for member in state["members"]}) == len(state["members"])


@settings(HISTORIES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers())
def test_any_order_and_any_duplication_make_one_run(spec, data, seed):
    one_state("run", data.draw(runs(spec)), seed)


receipt = st.builds(
    lambda day, first, more, rate, witness: {
        "day": f"2026-01-0{day}", "first": first, "last": first + more, "tokens": (more + 1) * rate, "witness": witness,
    },
    st.integers(1, 3), st.integers(1, 20), st.integers(0, 9), st.integers(0, 90), st.none() | DIGESTS,
)  # fmt: skip


@HISTORIES
@given(histories("credit", {"receipt": receipt}), st.integers())
def test_receipts_add_up_to_the_union_of_their_ranges(facts, seed):
    one_state("credit", facts, seed)
    days = folded("credit", facts)["days"].values()
    covered = {seq for each in facts for seq in range(each.payload.first, each.payload.last + 1)}
    most = max(each.payload.tokens / (each.payload.last - each.payload.first + 1) for each in facts)
    assert sum(day["tokens"] for day in days) <= most * len(covered)
    assert max(day["last"] for day in days) == max(covered)


@HISTORIES
@given(
    histories(
        "credit",
        {
            "receipt": receipt.map(
                lambda said: said | {"tokens": 7 * (said["last"] - said["first"] + 1)}
            )
        },
    )
)
def test_where_all_witnesses_agree_no_token_is_lost_or_counted_twice(facts):
    covered = {seq for each in facts for seq in range(each.payload.first, each.payload.last + 1)}
    assert sum(day["tokens"] for day in folded("credit", facts)["days"].values()) == 7 * len(
        covered
    )


def up_to(seq: int) -> int:
    """Tokens of an author's first updates, which are of many sizes."""
    return sum(1 + 37 * each % 91 for each in range(1, seq + 1))


@HISTORIES
@given(
    histories(
        "credit",
        {
            "receipt": receipt.map(
                lambda said: (
                    said
                    | {
                        "tokens": up_to(said["last"]) - up_to(said["first"] - 1),
                        "total": up_to(said["last"]),
                    }
                )
            )
        },
    )
)
def test_overlapping_ranges_count_exactly_if_the_author_signed_totals(facts):
    covered = {seq for each in facts for seq in range(each.payload.first, each.payload.last + 1)}
    right = sum(up_to(seq) - up_to(seq - 1) for seq in covered)
    assert sum(day["tokens"] for day in folded("credit", facts)["days"].values()) == right


CHECKPOINT = histories(
    "checkpoint",
    {
        "announce": st.builds(
            lambda id, tokens, at: {"id": id, "tokens": tokens, "checksum": "0" * 16, "size": 1, "announced": at},
            st.sampled_from(PLACES), st.integers(0, 5), AT,
        ),
        "hold": st.dictionaries(DIGESTS, AT, min_size=1).map(lambda holders: {"holders": holders}),
        "forget": st.just({}),
    },
)  # fmt: skip
PAUSE = histories("pause", {"start": st.builds(lambda at: {"at": at}, AT), "end": st.just({})})
FACTORS = st.sampled_from(PLACES[:3])
ACCESS = histories(
    "access",
    {
        "addresses": DIGESTS.map(lambda about: {"about": about}),
        "add": st.builds(lambda factor, type, about: {"factor": factor, "type": type, "about": about}, FACTORS,
                         st.sampled_from(["totp", "recovery_codes", "webauthn"]), DIGESTS),
        "remove": st.lists(FACTORS, max_size=2).map(lambda factors: {"factors": factors}),
        "spend": st.builds(lambda factor, codes: {"factor": factor, "codes": codes}, FACTORS,
                           st.lists(st.integers(0, 9), max_size=3)),
    },
)  # fmt: skip
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
        "set": st.builds(lambda kind, where, wanted: {"kind": kind, "where": where, "wanted": wanted},
                            st.sampled_from(["run.started", "run.ended"]), st.sampled_from(["site", "email"]),
                            st.booleans()),
        "forget": st.just({}),
    },
)  # fmt: skip
WEBHOOK = histories(
    "webhook",
    {
        "set": st.builds(lambda at, active, about: {"person": PEOPLE[0], "created": at, "active": active,
                                                    "about": about}, AT, st.booleans(), DIGESTS),
        "remove": st.just({}),
    },
)  # fmt: skip
VERDICT = histories(
    "verdict",
    {
        "give": st.builds(
            lambda id, at, key, body: {"id": id, "body": body, "signatures": {key: "a" * 128}, "given": at},
            st.sampled_from(PLACES), AT, DIGESTS, st.sampled_from(["one", "two"]),
        )
    },
)  # fmt: skip


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
def test_any_order_and_any_duplication_make_one_of_anything_else(history, seed):
    one_state(*history, seed)


# ---- the rules, one by one -------------------------------------------------------------------------------------------


def told(kind: str, *said: tuple[int, str, dict]):
    """The state of (time, what, payload)…, numbered from 1."""
    return folded(
        kind,
        [
            fact(kind, n, NOW + time, what, payload)
            for n, (time, what, payload) in enumerate(said, 1)
        ],
    )


AN_HOUR = "2026-01-01T01:00:00Z"
JOIN = (0, "join", {"joined": AN_HOUR, "about": digest("0")})
BAN, LEAVE = {"at": AN_HOUR}, {"at": AN_HOUR}


def named(n: int) -> str:
    return str(UUID(int=n << 64 | 7 << 76 | 2 << 62))


def test_a_ban_wins_over_an_unban_that_did_not_know_of_it():
    both = told(
        "person", JOIN, (1, "ban", BAN), (1, "ban", BAN), (9, "unban", {"lifts": [named(2)]})
    )
    assert both["bans"] == [named(3)] and both["banned"]
    assert (
        told("person", JOIN, (1, "ban", BAN), (9, "unban", {"lifts": [named(2)]}))["banned"] is None
    )
    assert (
        told("person", JOIN, (9, "ban", BAN), (1, "unban", {"lifts": [named(2)]}))["banned"] is None
    )  # clocks differ


def test_who_left_has_no_rights_whatever_was_granted_at_the_same_time():
    left = told(
        "person", JOIN, (1, "leave", LEAVE), (2, "grant", {"right": "is_staff", "given": True})
    )
    assert left["left"] and not left["is_staff"] and left["about"] is None


CREATE = (
    0,
    "create",
    {
        "word": digest("w"), "owner": PEOPLE[0], "report_every": 1.0, "quorum": 1, "created": AN_HOUR,
        "settings": {"version": 0, "about": digest("0"), "text": "a" * 16}, "terms": {"version": 0},
    },
)  # fmt: skip


def test_a_factor_that_was_removed_anywhere_is_gone_whoever_names_it_later():
    factor = {"factor": named(1), "type": "webauthn", "about": digest("1")}
    renamed = {**factor, "about": digest("2")}
    state = told(
        "access", (1, "add", factor), (2, "remove", {"factors": [named(1)]}), (3, "add", renamed)
    )
    assert state["factors"] == {}


def test_recovery_code_used_at_two_mirrors_is_used_once():
    sheets = [
        {"factor": named(n), "type": "recovery_codes", "about": digest(str(n))} for n in (1, 2)
    ]
    spent = [{"factor": named(1), "codes": [3, 4]}, {"factor": named(1), "codes": [4, 9]}]
    facts = [(1, "add", sheets[0]), (2, "spend", spent[0]), (2, "spend", spent[1])]
    assert told("access", *facts)["spent"] == {named(1): [3, 4, 9]}
    state = told("access", *facts, (3, "add", sheets[1]))
    assert state["spent"] == {} and list(state["factors"]) == [named(2)]


def becomes(time: int, status: str, epoch: int = 0):
    return time, "becomes", {"status": status, "epoch": epoch, "at": AN_HOUR}


def test_status_only_climbs_until_the_owner_raises_the_epoch():
    assert told("run", CREATE, becomes(2, "paused"), becomes(9, "training"))["status"] == "paused"
    assert (
        told("run", CREATE, becomes(9, "paused"), becomes(2, "training", 1))["status"] == "training"
    )
    assert (
        told("run", CREATE, becomes(1, "training", 1), becomes(2, "paused", 1))["status"]
        == "paused"
    )
    assert (
        told("run", CREATE, becomes(1, "cancelled"), becomes(2, "training", 5))["status"]
        == "cancelled"
    )
    assert (
        told("run", CREATE, becomes(1, "finished"), becomes(2, "cancelled", 5))["status"]
        == "finished"
    )


def test_settings_count_by_version_before_the_clock():
    def edit(time: int, version: int, about: str):
        return time, "edit", {"version": version, "about": digest(about), "text": "a" * 16}

    assert told("run", CREATE, edit(1, 2, "newer"), edit(9, 1, "later"))["about"] == digest("newer")
    assert told("run", CREATE, edit(1, 1, "sooner"), edit(9, 1, "later"))["about"] == digest(
        "later"
    )


def test_extensions_of_two_mirrors_add_up_and_the_first_launch_counts(spec):
    launch = {"slug": "a", "name": "A", "spec": spec, "manifest": digest("m"), "at": AN_HOUR}
    state = told(
        "run", CREATE, (3, "launch", launch | {"name": "B"}), (2, "launch", launch), (4, "extend", {"tokens": 5}),
        (4, "extend", {"tokens": 6}),
    )  # fmt: skip
    assert (state["extra"], state["launch"]["name"], state["status"]) == (11, "A", "recruiting")


def test_member_who_rejoined_elsewhere_stays_after_leaving_first_place():
    found = {"place": PLACES[0], "person": PEOPLE[0], "joined": AN_HOUR, "leads": True, "name": "A", "slug": "a",
             "created": AN_HOUR}  # fmt: skip
    join = {"place": PLACES[1], "person": PEOPLE[0], "joined": AN_HOUR, "leads": False}
    state = told(
        "team", (0, "found", found), (1, "join", join), (1, "part", {"places": [PLACES[0]]})
    )
    assert [(m["places"], m["leads"]) for m in state["members"]] == [([PLACES[1]], True)]
    assert told("team", (0, "found", found), (1, "part", {"places": [PLACES[0]]})) is None


def test_key_enrolled_twice_belongs_to_the_first_and_stays_revoked():
    def enrol(time: int, owner: str):
        return (
            time,
            "enrol",
            {"id": PLACES[0], "owner": owner, "enrolled": AN_HOUR, "about": digest("0")},
        )

    state = told(
        "machine", enrol(2, PEOPLE[1]), enrol(1, PEOPLE[0]), (0, "revoke", {"at": AN_HOUR})
    )
    assert state["owner"] == PEOPLE[0] and state["revoked"]
