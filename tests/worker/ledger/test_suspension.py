"""Tests of what follows from machines' opinions: who is vouched for and who is suspended."""

import random

import hypothesis.strategies as st
import pytest
from helpers.effort import examples
from helpers.updates.tickets import RUN, sign_ticket
from hypothesis import HealthCheck, given, settings

from barnraise.errors import MessageError
from barnraise.ledger.anchor import ABSENCE_MS, Anchor, TokenClaim, count_useful
from barnraise.ledger.anchor_diff import anchor_retractions
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.suspension import Statement, find_admitted, judge
from barnraise.ledger.update_queue import anchor_entry
from barnraise.ledger.validation import UpdateRules
from barnraise.ledger.verdict_set import VerdictSet, verify_proof
from barnraise.peering.transports import framing
from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import FragmentUpdate, Update
from barnraise.protocol.opinions import (
    AGREEMENT_MS,
    MAX_AGREEING,
    MAX_ALL_KEPT,
    MAX_ATTESTED,
    MAX_DOUBTED,
    Doubt,
    Opinions,
    SignedOpinions,
)
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.table_sizes import FEW
from barnraise.protocol.verdicts import SignedVerdict, Verdict
from barnraise.spec import ModelSpec, RunSpec

OWNER, MIRROR = Identity(b"o" * 32), Identity(b"m" * 32)
SPEC = RunSpec(ModelSpec(1, 16, 1, 8, 256), owner=OWNER.key, roots=(MIRROR.key,))
RULES = UpdateRules.from_spec(SPEC, RUN, frozenset([MIRROR.key]))
NOW = 10**12
STRANGER, INVITED, OWNING = Standing.STRANGER, Standing.INVITED, Standing.OWNER
NEWCOMER = Standing.NEWCOMER


def state(
    volunteer: str, standing: Standing, doubted="", agreeing="", time_ms=NOW, **kept
) -> Statement:
    """Return a statement of a volunteer; volunteers are single letters."""
    doubts = {letter: Doubt.model_construct(since_ms=time_ms, kept=kept) for letter in doubted}
    return Statement(volunteer, standing, time_ms, doubts, frozenset(agreeing))


def suspended(*statements: Statement, cleared=None) -> set[str]:
    return {*judge(statements, cleared or {}).suspended}


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ([state("a", INVITED, "x"), state("b", INVITED, "x")], "x"),
        ([state("a", INVITED, "x")], ""),  # one of two cannot say which one is right
        (
            [state("o", OWNING, "x"), state("a", INVITED, "", "x"), state("b", INVITED, "", "x")],
            "x",
        ),
        ([state("a", INVITED, "x"), state("b", INVITED, "x"), state("c", INVITED, "", "x")], "x"),
        ([state("a", INVITED, "x"), state("b", INVITED, "", "x")], ""),
        ([state("a", INVITED, "x"), state("a", INVITED, "x")], ""),  # two machines, one volunteer
        # Of two machines of one volunteer one doubts, whichever of them has stated so last.
        ([*(state(one, INVITED, "x") for one in "ab"), state("a", INVITED, "", "x", NOW + 1)], "x"),
        ([*(state(one, INVITED, "x") for one in "ab"), state("a", INVITED, "", "x", NOW - 1)], "x"),
        ([state("a", INVITED, "o"), state("b", INVITED, "o"), state("o", OWNING)], ""),
        ([state("a", STRANGER, "x"), state("b", STRANGER, "x")], ""),
    ],
)
def test_suspension_follows_from_the_vouched_who_compared(statements, expected):
    assert suspended(*statements) == {*expected}


def test_two_unvouched_accounts_suspend_nobody():
    owner = state("o", OWNING, agreeing="ab")
    strangers = [state(letter, STRANGER, "abo") for letter in "xy"]
    assert not suspended(owner, *strangers)
    assert not suspended(*strangers), "and neither where the owner vouches for nobody"
    assert judge(strangers, {}).vouched is None


def test_volunteers_who_left_long_ago_do_not_shield_a_volunteer():
    left = [state(letter, INVITED, "", "x") for letter in "abcd"]
    later = NOW + AGREEMENT_MS + 1
    doubts = [state(letter, INVITED, "x", time_ms=later) for letter in "ef"]
    assert suspended(*left, *doubts) == {"x"}
    assert not suspended(*(state(letter, INVITED, "", "x", later) for letter in "abcd"), *doubts)


def test_copies_of_honest_work_do_not_outvote_the_invited():
    """An account that republishes others' updates agrees with them, and is vouched for."""
    honest = [state(letter, INVITED, "", "abxyz") for letter in "ab"]
    copies = [state(letter, STRANGER, "ab", "xyz") for letter in "xyz"]
    judgement = judge([*honest, *copies], {})
    assert judgement.vouched == frozenset("abxyz") and not judgement.suspended


def test_work_vouches_for_a_stranger_and_for_those_who_follow():
    statements = [state("o", OWNING, "", "x"), state("x", STRANGER, "", "y")]
    assert judge(statements, {}).vouched == frozenset("ox")
    statements.append(state("a", INVITED, "", "y"))
    assert judge(statements, {}).vouched == frozenset("oaxy")


def test_cleared_volunteer_counts_again_until_a_later_doubt():
    doubts = [state(letter, INVITED, "x") for letter in "ab"]
    assert not suspended(*doubts, cleared={"x": NOW})
    later = [state(letter, INVITED, "x", time_ms=NOW + 1) for letter in "ab"]
    assert suspended(*later, cleared={"x": NOW}) == {"x"}


def test_no_minority_decides_what_stays_of_a_suspended_volunteer():
    doubts = [
        state(letter, INVITED, "x", k=kept)
        for letter, kept in zip("abc", (0, 7, 10**9), strict=True)
    ]
    assert judge(doubts, {}).suspended == {"x": {"k": 7}}


people = st.sampled_from("abcdefg")
statements = st.lists(
    st.builds(
        state,
        people,
        st.sampled_from([INVITED, INVITED, OWNING, STRANGER]),
        st.text("abcdefgx", max_size=3),
        st.text("abcdefgx", max_size=3),
        st.integers(NOW, NOW + 2 * AGREEMENT_MS),
    ),
    max_size=9,
)


@settings(max_examples=examples(200, 2000), deadline=None)
@given(statements, st.lists(st.sampled_from("pqrstuvw"), min_size=1, unique=True), st.data())
def test_number_of_unvouched_accounts_never_changes_anything(real, sybils, data):
    """Accounts without anybody's agreement doubt, agree and vouch for each other as they like."""
    letters = "abcdefgx" + "".join(sybils)
    lies = [
        state(
            sybil,
            STRANGER,
            data.draw(st.text(letters, max_size=6)),
            data.draw(st.text(letters, max_size=6)),
            data.draw(st.integers(NOW, NOW + 2 * AGREEMENT_MS)),
        )
        for sybil in sybils
    ]
    assert judge([*real, *lies], {}) == judge(real, {})


# ---- newcomers


def attest(volunteer: str, standing: Standing, attested: str, time_ms=NOW) -> Statement:
    return Statement(volunteer, standing, time_ms, {}, frozenset(), frozenset(attested))


def admitted(*statements: Statement) -> set[str]:
    return {*find_admitted(statements).attested}


def test_newcomer_needs_the_owners_machine_or_two_volunteers():
    assert admitted(attest("o", OWNING, "x")) == {*"x"}
    assert not admitted(attest("a", INVITED, "x")) and not admitted()
    assert admitted(attest("a", INVITED, "xy"), attest("b", INVITED, "x")) == {*"x"}
    assert not admitted(attest("a", INVITED, "x"), attest("a", INVITED, "x", NOW + 1))
    assert not admitted(attest("a", INVITED, "x"), attest("x", NEWCOMER, "x"))
    assert not admitted(*(attest(one, standing, "x") for one in "yz" for standing in (STRANGER,)))


def test_who_has_worked_for_it_attests_newcomers_and_these_nobody():
    """Two accounts that have worked could let in any number of others, and these as many again."""
    known = [attest(one, INVITED, "wx") for one in "ab"]
    workers = [attest(one, NEWCOMER, "yz") for one in "wx"]
    followers = [attest(one, NEWCOMER, "pq") for one in "yz"]
    assert admitted(*known, *workers, *followers) == {*"wxyz"}
    assert find_admitted([*known, *workers, *followers]).judges == {*"abwx"}


@settings(max_examples=examples(200, 2000), deadline=None)
@given(
    st.lists(
        st.builds(
            attest,
            people,
            st.sampled_from([INVITED, OWNING, NEWCOMER]),
            st.text("abcdefgx", max_size=4),
        ),
        max_size=9,
        unique_by=lambda statement: statement.volunteer,
    ),
    st.text("pqrst", max_size=5),
    people,
    st.text("abcdefgx", max_size=4),
)
def test_no_attestation_of_anybody_takes_one_away(real, sybils, attester, more):
    """So the set of admitted volunteers only grows, in whatever order statements arrive."""
    before = admitted(*real)
    grown = [
        attest(one.volunteer, one.standing, "".join(one.attested) + more)
        if one.volunteer == attester
        else one
        for one in real
    ]
    assert before <= admitted(*grown)
    idle = [attest(sybil, NEWCOMER, "abcdefgx" + sybils) for sybil in sybils]
    assert admitted(*real, *idle) == before, "accounts that nobody attests decide nothing"


# ---- the set


def identity(number: int) -> Identity:
    return Identity(bytes([number]) * 32)


def pseudonym(number: int) -> str:
    return f"{number:064x}"


def opine(number, doubted=(), agreeing=(), standing=INVITED, time=100, **fields) -> SignedOpinions:
    """Sign the opinions of a machine on volunteers, all by number."""
    signer = identity(number)
    opinions = Opinions(
        run=RUN,
        peer=signer.key,
        time_ms=1000 * time,
        doubted={
            pseudonym(other): fields.get("doubt") or Doubt(since_ms=1000 * time)
            for other in doubted
        },
        agreeing=[pseudonym(other) for other in agreeing],
        attested=[pseudonym(other) for other in fields.get("attested", ())],
    )
    ticket = sign_ticket(
        fields.get("mirror", MIRROR), signer.key, volunteer=pseudonym(number), standing=standing
    )
    return SignedOpinions(opinions=signer.sign("opinions", opinions), ticket=ticket)


def decide(**fields) -> SignedVerdict:
    signed = OWNER.sign("verdict", Verdict(run=RUN, **{"issued": 100.0, **fields}))
    return SignedVerdict(body=signed.body, signatures={signed.key: signed.signature})


some_proofs = st.lists(
    st.one_of(
        st.builds(
            opine,
            st.integers(1, 5),
            st.sets(st.integers(1, 5), max_size=3),
            st.sets(st.integers(1, 5), max_size=2),
            st.sampled_from([INVITED, OWNING, STRANGER]),
            st.integers(90, 110),
            attested=st.sets(st.integers(1, 5), max_size=3),
        ),
        st.builds(
            lambda number, issued: decide(cleared=[pseudonym(number)], issued=float(issued)),
            st.integers(1, 5),
            st.integers(90, 110),
        ),
        st.builds(lambda number: decide(volunteers={pseudonym(number): {}}), st.integers(1, 5)),
    ),
    max_size=10,
)


@settings(max_examples=examples(60, 500), deadline=None)
@given(some_proofs, st.data())
def test_opinions_in_any_order_and_number_give_one_set(proofs, data):
    sets = [VerdictSet.from_proof(proof) for proof in proofs]
    expected = VerdictSet()
    for one in sets:
        expected |= one
    order = data.draw(st.permutations(sets))
    repeated = data.draw(st.lists(st.sampled_from(sets), max_size=5)) if sets else []
    union = VerdictSet()
    for one in [*repeated, *order]:
        union = one | union
    assert union == expected and union.digest == expected.digest
    assert (union.suspended, union.vouched) == (expected.suspended, expected.vouched)
    numbers = range(1, 6)
    assert [*map(union.admits, map(pseudonym, numbers))] == [
        *map(expected.admits, map(pseudonym, numbers))
    ]
    assert union.effect_digest == expected.effect_digest
    assert all(union.covers(one) for one in sets)


def test_opinions_that_nobody_could_state_are_refused():
    verify_proof(opine(1, [2]), RULES)
    forged = opine(1).model_copy(update={"opinions": opine(2).opinions})
    early = opine(1, [2], doubt=Doubt(since_ms=200_000))
    for proof, reason in (
        (forged, "another run or peer"),
        (opine(1, mirror=OWNER), "not a mirror"),
        (opine(1, time=10**8), "without a valid ticket"),
        (early, "has not come"),
    ):
        with pytest.raises(MessageError, match=reason):
            verify_proof(proof, RULES)


def test_longest_opinions_fit_into_a_message():
    names = [f"{number:064x}" for number in range(MAX_AGREEING)]
    authors = [f"{number:064x}.{0:016x}" for number in range(MAX_ALL_KEPT)]
    kept = [dict.fromkeys(authors[n::MAX_DOUBTED], (1 << 53) - 1) for n in range(MAX_DOUBTED)]
    opinions = Opinions(
        run=RUN,
        peer=OWNER.key,
        time_ms=10**13,
        doubted={
            name: Doubt(since_ms=10**13, kept=stays)
            for name, stays in zip(names, kept, strict=False)
        },
        agreeing=names,
        attested=names[:MAX_ATTESTED],
    )
    ticket = sign_ticket(MIRROR, OWNER.key)
    framing.pack(SignedOpinions(opinions=OWNER.sign("opinions", opinions), ticket=ticket))


def test_idle_accounts_cannot_fill_the_set_of_opinions():
    full = VerdictSet()
    for number in range(FEW):
        signer = Identity(number.to_bytes(32))
        ticket = sign_ticket(MIRROR, signer.key, volunteer=f"{number + 1000:064x}")
        signed = signer.sign("opinions", Opinions(run=RUN, peer=signer.key, time_ms=1))
        full |= VerdictSet.from_proof(SignedOpinions(opinions=signed, ticket=ticket))
    stranger = VerdictSet.from_proof(opine(1, standing=STRANGER))
    assert not full.has_room_for(stranger)
    assert full.has_room_for(VerdictSet.from_proof(opine(1)))
    assert full.bind({f"{identity(1).key}.{0:016x}": pseudonym(1)}).has_room_for(stranger)


def chain(number: int, count: int, newcomer: bool = False) -> list:
    """Return the signed updates of a volunteer's machine; its payloads are not looked at."""
    signer, previous, headers = identity(number), digest(""), []
    for seq in range(1, count + 1):
        update = Update(
            run=RUN,
            peer=signer.key,
            incarnation="0" * 16,
            seq=seq,
            previous=previous,
            tokens=10,
            total=10 * seq,
            started_ms=0,
            time_ms=1000 * seq,
            ticket="0" * 64,
            volunteer=pseudonym(number),
            newcomer=newcomer,
            fragments=[FragmentUpdate(digest="a" * 64, size=20, sketch="0" * 16)] * 3,
        )
        headers.append((signer.sign("update", update), update))
        previous = digest(headers[-1][0].body)
    return headers


@settings(max_examples=examples(30, 200), deadline=None, suppress_health_check=list(HealthCheck))
@given(some_proofs, st.integers(0, 10**6))
def test_ledger_follows_suspensions_and_returns_in_any_order(
    tmp_path_factory, monkeypatch, proofs, seed
):
    monkeypatch.setattr("barnraise.ledger.blob_store.BlobStore.has", lambda *_: True)
    chance = random.Random(seed)
    ledger, anchor = Ledger(tmp_path_factory.mktemp("ledger")), Anchor([])
    chains = [chain(number, 4, newcomer=number > 1) for number in (1, 2, 3)]
    waiting = [list(headers) for headers in chains]
    remaining = [VerdictSet.from_proof(proof) for proof in proofs]
    while any(waiting) or remaining:
        if remaining and chance.random() < 0.5:
            change = ledger.apply_verdicts(remaining.pop())
            for entry in (
                *anchor_retractions(ledger, change.vector, change.retracted),
                *(anchor_entry(update, ledger.verdicts) for update in change.returned),
            ):
                anchor.record(entry)
        else:
            headers = chance.choice(waiting)
            if headers:
                signed, update = headers.pop(0)
                if ledger.append(signed, update).value == "added":
                    anchor.record(update)
    assert anchor.vector == ledger.vector(), "the changes lead to it one by one"
    for headers in chains:  # peers send again what was refused meanwhile
        for signed, update in headers:
            ledger.append(signed, update)
    expected = VerdictSet()
    for proof in proofs:
        expected |= VerdictSet.from_proof(proof)
    authors = [headers[0][1] for headers in chains]
    bound = expected.bind(
        {update.author: update.volunteer for update in authors},
        {update.author for update in authors if update.newcomer},
    )
    assert ledger.vector() == bound.clamp({headers[0][1].author: 4 for headers in chains})
    ledger.close()
    reopened = Ledger(ledger.blobs.folder.parent)
    assert reopened.verdicts == expected and reopened.vector() == ledger.vector()
    reopened.close()


# ---- the budget


def test_run_does_not_end_by_tokens_of_idle_accounts():
    claims = {"a": TokenClaim(0, 1000, 60), "b": TokenClaim(0, 1000, 40)}
    idle = {f"x{n}": TokenClaim(0, 1000, 10**9) for n in range(20)}
    volunteers = {author: author for author in claims | idle}
    assert count_useful(claims | idle, volunteers, frozenset("ab")) == 200
    assert count_useful(claims, volunteers, frozenset("ab")) == 100
    assert count_useful(claims | idle, volunteers, None) == 100 + 20 * 10**9
    assert count_useful(idle, volunteers, frozenset("ab")) == 0


def test_run_goes_on_when_the_vouched_have_left():
    x = TokenClaim(1000, 1000 + 2 * ABSENCE_MS, 10**6)
    claims = {"a": TokenClaim(0, 1000, 50), "x": x}
    volunteers = {author: author for author in claims}
    assert count_useful(claims, volunteers, frozenset("a")) == 50 + 50 + 5 * 10**5
    assert count_useful(claims, volunteers, frozenset("ax")) == 50 + 10**6


@settings(max_examples=examples(100, 500), deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=5), st.lists(st.integers(0, 10**9), max_size=20))
def test_unvouched_accounts_at_most_double_the_count(honest, idle):
    claims = {f"h{n}": TokenClaim(0, 1000, tokens) for n, tokens in enumerate(honest)}
    strange = {f"x{n}": TokenClaim(0, 1000, tokens) for n, tokens in enumerate(idle)}
    volunteers = {author: author for author in claims | strange}
    counted = count_useful(claims | strange, volunteers, frozenset(claims))
    assert sum(honest) <= counted <= 2 * sum(honest)
