"""Tests of the verdict set, its proofs, and the retractions that follow for an anchor."""

import itertools
import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from helpers.effort import examples
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.updates.headers import PART, build_update, sign_chain
from helpers.updates.tickets import RUN, sign_ticket
from hypothesis import HealthCheck, given, settings

from barnraise.cli.verdict import build_verdict
from barnraise.errors import MessageError, StateError, UnprovenVerdictError
from barnraise.exchange.verdicts.verdict_sync import (
    MAX_ANSWERS,
    MAX_PROOF_BYTES,
    SAMPLE_SECONDS,
    SAMPLED_HEADS,
    VERDICT_RESEND_SECONDS,
    CompareVerdicts,
    ProofIndex,
    SendHeads,
    SendProofs,
    VerdictSync,
)
from barnraise.ledger import ledger as ledger_module
from barnraise.ledger import verdict_set as verdicts_module
from barnraise.ledger.anchor import Anchor
from barnraise.ledger.anchor_diff import anchor_retractions, updates_between
from barnraise.ledger.ledger import GENESIS_DIGEST, Ledger, Outcome
from barnraise.ledger.update_queue import anchor_entry
from barnraise.ledger.validation import UpdateRules
from barnraise.ledger.verdict_set import VerdictSet, verify_proof
from barnraise.protocol import messages
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.mirror_list import Expulsion, MirrorList, parse_list
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.verdicts import SignedVerdict, Verdict, VerdictNames
from barnraise.spec import ModelSpec, RunSpec

OWNER, MIRROR, SECOND, AUTHOR, STRANGER = (Identity(bytes([n]) * 32) for n in (1, 2, 3, 4, 5))
MIRRORS = frozenset([MIRROR.key, SECOND.key])
SPEC = RunSpec(
    ModelSpec(1, 16, 1, 8, 256), owner=OWNER.key, roots=(MIRROR.key, SECOND.key), threshold=2
)
RULES = UpdateRules.from_spec(SPEC, RUN, MIRRORS)
NAMES = [f"{AUTHOR.key}.{n:016x}" for n in range(3)]


def header(
    seq: int,
    life: int = 0,
    previous: str = GENESIS_DIGEST,
    tokens: int = 10,
    total: int | None = None,
) -> messages.Signed:
    update = build_update(
        AUTHOR.key,
        seq,
        incarnation=f"{life:016x}",
        previous=previous,
        tokens=tokens,
        total=10 * seq if total is None else total,
        fragments=[PART] * len(RULES.sizes),
    )
    return AUTHOR.sign("update", update)


def ticket(by: Identity = MIRROR) -> messages.Signed:
    return sign_ticket(by, AUTHOR.key, run=RUN, expires=1.0)


def signed_verdict(
    after=None, updates=None, by=(OWNER,), run: str = RUN, **exclusions
) -> SignedVerdict:
    verdict = Verdict(run=run, after=after or {}, updates=updates or {}, issued=1.0, **exclusions)
    copies = [identity.sign("verdict", verdict) for identity in by]
    return SignedVerdict(
        body=copies[0].body, signatures={signed.key: signed.signature for signed in copies}
    )


def fork(seq: int, life: int = 0, other: int = 11) -> Fork:
    return Fork(one=header(seq, life), other=header(seq, life, tokens=other), ticket=ticket())


# ---- the set


PROOFS = [
    signed_verdict({NAMES[0]: 3}),
    signed_verdict({NAMES[0]: 3}, by=(MIRROR, SECOND)),
    signed_verdict({NAMES[0]: 5, NAMES[1]: 1}),
    signed_verdict(updates={NAMES[0]: {2: 10, 4: 10}}),
    signed_verdict(updates={NAMES[2]: {7: 10}}),
    fork(4),
    fork(2),
    fork(2, other=12),
    fork(9, life=1),
]


@settings(max_examples=examples(25, 60), deadline=None)
@given(st.lists(st.sampled_from(range(len(PROOFS)))), st.permutations(range(len(PROOFS))))
def test_verdict_set_any_order_and_duplication_gives_one_set(duplicates, order):
    union = VerdictSet()
    for index in [*duplicates, *order]:
        union |= VerdictSet.from_proof(PROOFS[index])
    expected = VerdictSet()
    for proof in PROOFS:
        expected = VerdictSet.from_proof(proof) | expected
    assert union == expected and union.digest == expected.digest
    assert union.limits == {NAMES[0]: 1, NAMES[1]: 1}
    assert union.singles == {NAMES[2]: {7: 10}}, "singles past a limit are redundant"


@given(
    st.lists(st.sampled_from(range(len(PROOFS))), max_size=4),
    st.lists(st.sampled_from(range(len(PROOFS)))),
)
def test_verdict_set_union_with_covered_set_changes_nothing(first, second):
    one, other = VerdictSet(), VerdictSet()
    for index in first:
        one |= VerdictSet.from_proof(PROOFS[index])
    for index in second:
        other |= VerdictSet.from_proof(PROOFS[index])
    assert (one | other).covers(one) and (one | other).covers(other)
    assert one.covers(other) == ((one | other).digest == one.digest)


VOLUNTEER, OTHER_VOLUNTEER = "1" * 64, "2" * 64


def test_exclusion_of_a_key_cuts_off_every_incarnation_it_has_or_takes():
    excluded = VerdictSet.from_proof(signed_verdict(keys={AUTHOR.key: {NAMES[0]: 3}}))
    assert [excluded.limit(name) for name in NAMES] == [3, 0, 0]
    assert excluded.limit(f"{STRANGER.key}.{'0' * 16}") is None
    assert excluded.excludes(AUTHOR.key, VOLUNTEER)
    assert not excluded.excludes(STRANGER.key, VOLUNTEER)
    twice = excluded | VerdictSet.from_proof(signed_verdict(keys={AUTHOR.key: {NAMES[1]: 9}}))
    assert [twice.limit(name) for name in NAMES] == [0, 0, 0], (
        "only what every verdict leaves stays"
    )


def test_exclusion_of_a_volunteer_cuts_off_all_keys_that_name_it():
    verdict = signed_verdict(volunteers={VOLUNTEER: {NAMES[1]: 4}})
    excluded = VerdictSet.from_proof(verdict).bind(
        {NAMES[0]: VOLUNTEER, NAMES[1]: VOLUNTEER, NAMES[2]: OTHER_VOLUNTEER}
    )
    assert [excluded.limit(name) for name in NAMES] == [0, 4, None]
    assert excluded.limit("unknown", VOLUNTEER) == 0
    assert excluded.excludes(STRANGER.key, VOLUNTEER)
    assert excluded.clamp(dict.fromkeys(NAMES, 9)) == {NAMES[1]: 4, NAMES[2]: 9}


def test_signatures_under_one_verdict_add_up_in_any_order():
    singles = [signed_verdict({NAMES[0]: 1}, by=(by,)) for by in (OWNER, MIRROR, SECOND)]
    sets = [VerdictSet.from_proof(single) for single in singles]
    unions = [a | b | c for a, b, c in itertools.permutations(sets)]
    assert all(union == unions[0] and union.digest == unions[0].digest for union in unions)
    assert unions[0].digest != sets[0].digest, "peers exchange the signatures that they lack"
    assert len(next(iter(unions[0].rulings.values())).signatures) == 3
    assert unions[0].covers(sets[1]) and not sets[1].covers(unions[0])


def test_empty_verdict_set_has_no_digest_and_retracts_nothing():
    empty = VerdictSet()
    assert empty.digest is None
    assert not empty.is_retracted(NAMES[0], 1)
    assert empty.clamp({NAMES[0]: 3}) == {NAMES[0]: 3}


def test_verdict_set_limits_and_single_retractions():
    verdict = VerdictSet.from_proof(signed_verdict({NAMES[0]: 3}, {NAMES[1]: {2: 50}}))
    verdicts = verdict | VerdictSet.from_proof(fork(1, life=2))
    assert [verdicts.is_retracted(NAMES[0], seq) for seq in (3, 4)] == [False, True]
    assert [verdicts.is_retracted(NAMES[1], seq) for seq in (1, 2, 3)] == [False, True, False]
    assert verdicts.clamp(dict.fromkeys(NAMES, 9)) == {NAMES[0]: 3, NAMES[1]: 9}
    assert verdicts.retracted_within({NAMES[1]: 1}) == {}
    assert verdicts.retracted_within({NAMES[1]: 2}) == {NAMES[1]: {2: 50}}


def test_verdict_set_forks_of_one_peer_are_bounded(monkeypatch):
    monkeypatch.setattr(verdicts_module, "MAX_FORKS_PER_PEER", 2)
    verdicts = VerdictSet.from_proof(fork(1)) | VerdictSet.from_proof(fork(1, life=1))
    assert not verdicts.has_room_for(VerdictSet.from_proof(fork(1, life=2)))
    assert verdicts.has_room_for(VerdictSet.from_proof(fork(1, life=1, other=12)))
    known = verdicts.bind({f"{AUTHOR.key}.{2:016x}": "v"})
    assert known.has_room_for(VerdictSet.from_proof(fork(1, life=2))), (
        "machines with one half each of its updates would never agree again"
    )
    assert verdicts.has_room_for(VerdictSet.from_proof(signed_verdict({NAMES[0]: 1})))


# ---- proofs


def test_verify_proof_accepts_owner_or_enough_mirrors():
    for by in ((OWNER,), (MIRROR, SECOND), (OWNER, MIRROR)):
        assert verify_proof(signed_verdict({NAMES[0]: 1}, by=by), RULES).limits == {NAMES[0]: 1}
    assert verify_proof(fork(3), RULES).limits == {NAMES[0]: 2}


@pytest.mark.parametrize(
    ("proof", "reason"),
    [
        (signed_verdict(by=(MIRROR,)), "needs its run's owner, or 1 more"),
        (signed_verdict(by=(STRANGER,)), "neither the run's owner nor one of its mirrors"),
        (signed_verdict(by=(OWNER, STRANGER)), "neither the run's owner"),
        (signed_verdict(run="01890000-0000-7000-8000-00000000000f"), "is for run"),
        (
            signed_verdict().model_copy(update={"signatures": {OWNER.key: "0" * 128}}),
            "signature does not match",
        ),
        (
            signed_verdict({NAMES[0]: 1}).model_copy(
                update={"body": signed_verdict({NAMES[0]: 2}).body}
            ),
            "signature does not match",
        ),
        (
            SignedVerdict(
                body="{}",
                signatures={
                    OWNER.key: OWNER.sign("verdict", messages.Goodbye(reason="x")).signature
                },
            ),
            "signature",
        ),
        (SignedVerdict(body="{" + "é" * 40_000, signatures={OWNER.key: "0" * 128}), "more than"),
        (fork(3).model_copy(update={"other": header(3)}), "not two different updates"),
        (fork(3).model_copy(update={"other": header(4)}), "not two different updates"),
        (fork(3).model_copy(update={"other": header(3, life=1)}), "not two different updates"),
        (fork(3).model_copy(update={"ticket": ticket(by=STRANGER)}), "not a mirror"),
        (
            fork(3).model_copy(
                update={"other": header(3).model_copy(update={"signature": "0" * 128})}
            ),
            "signature",
        ),
        (
            fork(3).model_copy(
                update={"other": STRANGER.sign("update", messages.Goodbye(reason="x"))}
            ),
            "malformed",
        ),
    ],
)
def test_verify_proof_refuses_with_the_reason(proof, reason):
    with pytest.raises(MessageError, match=reason):
        verify_proof(proof, RULES)


# ---- the mirror list: who may sign

THIRD, FOURTH = (Identity(bytes([n]) * 32) for n in (6, 7))


def mirror_list(version: int, since: dict[Identity, int], expelled=()) -> MirrorList:
    mirrors = [
        list_entry(
            mirror,
            f"https://{mirror.key[:8]}.example.org",
            since=admitted,
            expelled=Expulsion(at=1.0, since=version) if mirror in expelled else None,
        )
        for mirror, admitted in since.items()
    ]
    return parse_list(signed_list(version, *mirrors))


def with_list(rules: UpdateRules, newest: MirrorList) -> UpdateRules:
    return rules.with_mirrors(rules.mirrors.with_list(newest))


TWO_MIRRORS = replace(RULES, mirrors=replace(RULES.mirrors, threshold=1))  # half of two


def test_rogue_mirror_of_three_cannot_sign_a_verdict_alone():
    rules = with_list(RULES, mirror_list(1, {MIRROR: 1, SECOND: 1, THIRD: 1}))
    with pytest.raises(UnprovenVerdictError, match="1 more of the mirrors"):
        verify_proof(signed_verdict({NAMES[0]: 0}, by=(MIRROR,), mirror_list_version=1), rules)
    both = signed_verdict({NAMES[0]: 0}, by=(MIRROR, THIRD), mirror_list_version=1)
    assert verify_proof(both, rules).limits == {NAMES[0]: 0}


@pytest.mark.parametrize("named_version", [0, 1, 2, 3])
def test_expelled_mirror_cannot_backdate_a_verdict(named_version):
    rules = with_list(TWO_MIRRORS, mirror_list(3, {MIRROR: 1, SECOND: 1}, expelled=[MIRROR]))
    forged = signed_verdict({NAMES[0]: 0}, by=(MIRROR,), mirror_list_version=named_version)
    with pytest.raises(UnprovenVerdictError, match="not expelled"):
        verify_proof(forged, rules)
    joint = signed_verdict({NAMES[0]: 0}, by=(MIRROR, SECOND), mirror_list_version=named_version)
    assert verify_proof(joint, rules).limits == {NAMES[0]: 0}, "enough others signed it"


def test_later_mirrors_sign_under_the_list_that_admitted_them():
    later = {MIRROR: 1, SECOND: 1, THIRD: 2, FOURTH: 2}
    verdict = signed_verdict({NAMES[0]: 2}, by=(THIRD, FOURTH), mirror_list_version=2)
    with pytest.raises(UnprovenVerdictError, match="names the mirror list 2"):
        verify_proof(verdict, RULES)
    rules = with_list(RULES, mirror_list(2, later))
    assert verify_proof(verdict, rules).limits == {NAMES[0]: 2}
    early = signed_verdict({NAMES[0]: 2}, by=(THIRD, FOURTH), mirror_list_version=1)
    with pytest.raises(UnprovenVerdictError):
        verify_proof(early, rules)


def test_larger_list_asks_for_more_signatures_than_the_run_did():
    rules = with_list(TWO_MIRRORS, mirror_list(2, {MIRROR: 1, SECOND: 1, THIRD: 2, FOURTH: 2}))
    one = signed_verdict({NAMES[0]: 2}, by=(FOURTH,), mirror_list_version=2)
    with pytest.raises(UnprovenVerdictError, match="1 more"):
        verify_proof(one, rules)
    before = signed_verdict({NAMES[0]: 2}, by=(MIRROR,), mirror_list_version=1)
    assert verify_proof(before, rules), "a verdict keeps the force that its list gave it"


# ---- a ledger and an anchor under verdicts


VOLUNTEERS = [VOLUNTEER, OTHER_VOLUNTEER]
FIRST_CHAIN = sign_chain(AUTHOR, 7, volunteer=VOLUNTEER)
SECOND_CHAIN = sign_chain(STRANGER, 5, tokens=7, volunteer=OTHER_VOLUNTEER)
AUTHORS = [FIRST_CHAIN[0][1].author, SECOND_CHAIN[0][1].author]
KEYS = [AUTHOR.key, STRANGER.key]
some_verdicts = st.lists(
    st.one_of(
        st.builds(
            lambda number, last: signed_verdict(keys={KEYS[number]: {AUTHORS[number]: last}}),
            st.integers(0, 1),
            st.integers(0, 6),
        ),
        st.builds(
            lambda number, last: signed_verdict(
                volunteers={VOLUNTEERS[number]: {AUTHORS[number]: last}}
            ),
            st.integers(0, 1),
            st.integers(0, 6),
        ),
        st.builds(
            lambda author, last: signed_verdict({author: last}),
            st.sampled_from(AUTHORS),
            st.integers(0, 6),
        ),
        st.builds(
            lambda author, seq: signed_verdict(
                updates={author: {seq: 10 if author == AUTHORS[0] else 7}}
            ),
            st.sampled_from(AUTHORS),
            st.integers(1, 7),
        ),
    ),
    max_size=4,
)


def bring_up_to_date(anchor: Anchor, ledger: Ledger) -> None:
    """Apply to the anchor what the exchange delivers to its training loop at a start."""
    for retraction in anchor_retractions(ledger, anchor.vector, anchor.retracted):
        anchor.record(retraction)
    for _, update in ledger.updates_since(anchor.vector):
        anchor.record(anchor_entry(update, ledger.verdicts))


def bring_together(ledger: Ledger, anchor: Anchor, verdicts: list[VerdictSet], chance) -> None:
    """Deliver both chains and the verdicts in an order left to chance; the anchor follows."""
    headers = {AUTHORS[0]: list(FIRST_CHAIN), AUTHORS[1]: list(SECOND_CHAIN)}
    while any(headers.values()) or verdicts:
        author = chance.choice(AUTHORS)
        if verdicts and chance.random() < 0.3:
            ledger.apply_verdicts(verdicts.pop())
        elif headers[author]:
            outcome = ledger.append(*headers[author].pop(0))
            assert outcome in (Outcome.ADDED, Outcome.RETRACTED)
        if chance.random() < 0.3:
            bring_up_to_date(anchor, ledger)
    bring_up_to_date(anchor, ledger)


def test_exclusion_after_an_earlier_verdict_cuts_off_who_came_in_between(tmp_path):
    """The earlier verdict comes before the first update, when no volunteer is known."""
    ledger = Ledger(tmp_path)
    ledger.apply_verdicts(VerdictSet.from_proof(signed_verdict({AUTHORS[1]: 3})))
    assert ledger.append(*FIRST_CHAIN[0]) is Outcome.ADDED
    exclusion = signed_verdict(volunteers={VOLUNTEERS[0]: {AUTHORS[0]: 0}})
    ledger.apply_verdicts(VerdictSet.from_proof(exclusion))
    assert (ledger.vector(), ledger.tokens) == ({}, 0)
    ledger.close()


@settings(max_examples=examples(25, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(some_verdicts, st.integers(0, 10**6))
def test_retractions_bring_any_anchor_to_the_ledgers_state(tmp_path_factory, verdicts, seed):
    ledger, anchor = Ledger(tmp_path_factory.mktemp("ledger")), Anchor([])
    sets = [VerdictSet.from_proof(verdict) for verdict in verdicts]
    bring_together(ledger, anchor, sets, random.Random(seed))
    vector = ledger.vector()
    assert (anchor.vector, anchor.retracted) == (vector, ledger.verdicts.retracted_within(vector))
    bound = ledger.verdicts.bind(dict(zip(AUTHORS, VOLUNTEERS, strict=True)))
    counted = [
        update.tokens
        for _, update in [*FIRST_CHAIN, *SECOND_CHAIN]
        if not bound.is_retracted(update.author, update.seq)
    ]
    assert anchor.tokens == ledger.tokens == sum(counted)
    fresh = Anchor([])
    bring_up_to_date(fresh, ledger)
    assert (fresh.heads, fresh.retracted) == (anchor.heads, anchor.retracted)
    ledger.close()


@settings(max_examples=examples(25, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(some_verdicts, some_verdicts, st.integers(0, 10**6))
def test_dropped_verdicts_of_an_expelled_mirror_leave_no_trace(
    tmp_path_factory, by_owner, forged, seed
):
    chance = random.Random(seed)
    rules = with_list(TWO_MIRRORS, mirror_list(1, {MIRROR: 1, SECOND: 1}))
    after = with_list(TWO_MIRRORS, mirror_list(2, {MIRROR: 1, SECOND: 1}, expelled=[MIRROR]))
    ledger, anchor = Ledger(tmp_path_factory.mktemp("ledger")), Anchor([])
    proofs = [*by_owner, *(signed_by(MIRROR, verdict) for verdict in forged)]
    sets = [verify_proof(proof, rules) for proof in proofs]
    chance.shuffle(sets)
    bring_together(ledger, anchor, sets, chance)
    ledger.drop_powerless_verdicts(after)
    ledger.close()
    ledger = Ledger(ledger.blobs.folder.parent)
    for chain in (FIRST_CHAIN, SECOND_CHAIN):  # peers send again what was refused meanwhile
        for header in chain:
            ledger.append(*header)
    bring_up_to_date(anchor, ledger)
    clean = Ledger(tmp_path_factory.mktemp("clean"))
    for verdict in by_owner:
        clean.apply_verdicts(verify_proof(verdict, after))
    for header in (*FIRST_CHAIN, *SECOND_CHAIN):
        clean.append(*header)
    assert (ledger.vector(), ledger.tokens) == (clean.vector(), clean.tokens)
    assert ledger.verdicts == clean.verdicts
    vector = clean.vector()
    assert (anchor.vector, anchor.retracted) == (vector, clean.verdicts.retracted_within(vector))
    assert anchor.tokens == clean.tokens
    ledger.close()
    clean.close()


def signed_by(identity: Identity, verdict: SignedVerdict) -> SignedVerdict:
    """Return the same text, a word different, signed by another identity."""
    text = Verdict.model_validate_json(verdict.body).model_copy(update={"reason": "forged"})
    signed = identity.sign("verdict", text)
    return SignedVerdict(body=signed.body, signatures={signed.key: signed.signature})


@given(st.integers(0, 7), st.integers(0, 7), st.sets(st.integers(1, 7)), st.sets(st.integers(1, 7)))
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_updates_between_is_the_difference_of_two_sets(
    full_ledger, start, end, start_retracted, end_retracted
):
    author = AUTHORS[0]
    retracted_at_start = {seq: 10 for seq in start_retracted if seq <= start}
    retracted_at_end = {seq: 10 for seq in end_retracted if seq <= end}
    difference = updates_between(
        full_ledger,
        {author: start},
        {author: retracted_at_start},
        {author: end},
        {author: retracted_at_end},
    )
    before = set(range(1, start + 1)) - retracted_at_start.keys()
    after = set(range(1, end + 1)) - retracted_at_end.keys()
    assert {(update.seq, times) for update, times in difference} == {
        *((seq, 1) for seq in after - before),
        *((seq, -1) for seq in before - after),
    }


@pytest.fixture(scope="module")
def full_ledger(tmp_path_factory):
    ledger = Ledger(tmp_path_factory.mktemp("full"))
    for header in FIRST_CHAIN:
        ledger.append(*header)
    yield ledger
    ledger.close()


def test_author_cannot_continue_under_another_volunteer(tmp_path):
    ledger = Ledger(tmp_path)
    assert ledger.append(*FIRST_CHAIN[0]) is Outcome.ADDED
    stray = FIRST_CHAIN[1][1].model_copy(update={"volunteer": OTHER_VOLUNTEER})
    assert ledger.append(AUTHOR.sign("update", stray), stray) is Outcome.INCONSISTENT
    ledger.close()


def test_expected_sketches_follow_added_and_retracted_updates():
    parts = [
        messages.FragmentUpdate(digest="a" * 64, size=1, sketch=f"{n:016x}") for n in (5, 1 << 40)
    ]
    update = FIRST_CHAIN[0][1].model_copy(update={"fragments": parts})
    anchor = Anchor([torch.zeros(1, dtype=torch.int32)] * 2)
    anchor.restore({}, {}, ["0" * 16] * 2)
    anchor.record(update)
    assert anchor.expected_sketches == [f"{5:016x}", f"{1 << 40:016x}"]
    assert not anchor.is_intact(0) and anchor.is_intact(1), (
        "only the lower half counts: a weight that wraps changes the upper half"
    )


# ---- comparison with peers


def state(verdicts: str | None = None, heads: str | None = None) -> messages.PeerState:
    return messages.PeerState(vector={}, rate=0.0, verdicts_digest=verdicts, heads_digest=heads)


def sync_of(verdicts: str | None = None, sizes: dict[str, int] | None = None) -> VerdictSync:
    """Return the comparison of a machine with a verdict set of this digest."""
    sync = VerdictSync()
    sync.on_verdicts(verdicts, sizes or {})
    return sync


def test_verdict_sync_sends_verdicts_at_once_then_at_intervals():
    sync = sync_of("a" * 64)
    assert sync.next_actions(0.0) == []
    sync.on_state("x", state(), False, "f" * 64)
    sync.on_state("y", state("a" * 64), False, "f" * 64)
    names = VerdictNames(prefix="", names=[])
    assert sync.next_actions(0.0) == [CompareVerdicts("x", names)]
    assert sync.next_actions(1.0) == []
    assert sync.next_actions(VERDICT_RESEND_SECONDS) == [CompareVerdicts("x", names)]
    assert sync.has_same_verdicts("y") and not sync.has_same_verdicts("x")
    sync.on_verdicts("b" * 64, {})
    assert {action.to for action in sync.next_actions(VERDICT_RESEND_SECONDS + 1)} == {"x", "y"}
    sync.on_state("x", state("b" * 64), False, "f" * 64)
    sync.on_disconnected("y")
    assert sync.next_actions(50.0) == [] and sync.has_same_verdicts("x")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 300), st.integers(0, 10**6))
def test_verdict_sync_sends_only_what_the_other_lacks(shared, first_extra, second_extra, seed):
    chance = random.Random(seed)
    names = [f"{chance.getrandbits(256):064x}" for _ in range(shared + first_extra + second_extra)]
    owned = [
        set(names[: shared + first_extra]),
        set(names[:shared] + names[shared + first_extra :]),
    ]
    union = owned[0] | owned[1]
    sent = 0
    for attempt in range(100):
        if owned[0] == owned[1]:
            break
        syncs = [sync_of(digest(str(sorted(mine))), dict.fromkeys(mine, 400)) for mine in owned]
        now = attempt * VERDICT_RESEND_SECONDS
        for sync in syncs:
            sync.on_state("other", state("0" * 64), False, "f" * 64)
        queue = [(n, action) for n in (0, 1) for action in syncs[n].next_actions(now)]
        while queue:
            sender, action = queue.pop(0)
            receiver = 1 - sender
            if isinstance(action, SendProofs):
                sent += len(action.names)
                owned[receiver] |= set(action.names)
                continue
            message = action.message
            assert len(message.model_dump_json()) < 20_000, "no message grows with the set"
            is_names = isinstance(message, VerdictNames)
            answer = syncs[receiver].on_names if is_names else syncs[receiver].on_summary
            queue += [(receiver, reply) for reply in answer("other", message, now)]
    assert owned[0] == owned[1] == union
    assert sent <= 4 * (first_extra + second_extra), "common proofs are not sent"


def test_flood_of_verdict_questions_is_answered_within_an_allowance():
    names = {digest(str(n)): 50_000 for n in range(500)}
    sync = sync_of("a" * 64, names)
    answers = []
    for _ in range(2_000):
        answers += sync.on_names("x", VerdictNames(prefix="", names=[]), 0.0)
        answers += sync.on_summary("x", ProofIndex({}).summarise(""), 0.0)
    proofs = sum(len(action.names) for action in answers if isinstance(action, SendProofs))
    assert 50_000 * proofs <= MAX_PROOF_BYTES and len(answers) < 2 * MAX_ANSWERS


def test_verdict_sync_without_verdicts_sends_nothing():
    sync = sync_of()
    sync.on_state("x", state("a" * 64), False, "f" * 64)
    assert sync.next_actions(0.0) == []


def test_verdict_sync_two_mismatches_in_a_row_send_heads():
    sync = sync_of()
    same, other = state(heads="f" * 64), state(heads="e" * 64)
    for received, equal in ((other, True), (same, True), (other, False), (other, True)):
        sync.on_state("x", received, equal, "f" * 64)
        assert sync.next_actions(0.0) == []
    sync.on_state("x", other, True, "f" * 64)
    assert sync.next_actions(0.0) == [SendHeads("x")] and sync.next_actions(0.1) == []
    sync.on_state("x", same, False, "f" * 64)
    assert sync.next_actions(SAMPLE_SECONDS - 0.1) == []
    assert sync.next_actions(SAMPLE_SECONDS) == [SendHeads("x", SAMPLED_HEADS)], (
        "a fork of an author that is silent would stay unknown while vectors differ"
    )
    sync.on_state("x", state(), True, "f" * 64)
    assert sync.next_actions(100.0) == [], "a peer that sends no digest cannot be compared"


# ---- the owner's command


def test_verdict_command_names_stored_updates_with_their_tokens(full_ledger):
    author = AUTHORS[0]
    verdict = build_verdict(full_ledger, RUN, {author: 5}, {author: [2]}, 20, "it was noise")
    assert verdict.after == {author: 5} and verdict.updates == {author: {2: 10}}
    assert verdict.reason == "it was noise"


@pytest.mark.parametrize(
    ("after", "singles", "horizon", "reason"),
    [
        ({AUTHORS[0]: 7}, {}, 20, "no such update"),
        ({}, {AUTHORS[0]: [8]}, 20, "update 8 of .* is not in this machine's ledger"),
        ({}, {AUTHORS[1]: [1]}, 20, "is not in this machine's ledger"),
    ],
)
def test_verdict_command_refuses_unenforceable_verdict(
    full_ledger, after, singles, horizon, reason
):
    with pytest.raises(StateError, match=reason):
        build_verdict(full_ledger, RUN, after, singles, horizon)


def test_author_cannot_push_its_updates_past_the_horizon(tmp_path, monkeypatch):
    """The attack of the review: the liar's own 123 updates made its first ones too old."""
    monkeypatch.setattr(ledger_module, "HORIZON_SECONDS", 0.0)
    ledger = Ledger(tmp_path)
    liars = sign_chain(AUTHOR, 123, tokens=40_000, volunteer=VOLUNTEER)
    honest = sign_chain(STRANGER, 6, tokens=100, volunteer=VOLUNTEER)
    for header in [honest[0], *liars, *honest[1:4]]:
        ledger.append(*header)
    assert build_verdict(ledger, RUN, {AUTHORS[0]: 0}, {}, horizon=3).after == {AUTHORS[0]: 0}
    for header in honest[4:]:
        ledger.append(*header)
    with pytest.raises(StateError, match="verdicts reach back 3 rounds of the other machines"):
        build_verdict(ledger, RUN, {AUTHORS[0]: 0}, {}, horizon=3)
    monkeypatch.setattr(ledger_module, "HORIZON_SECONDS", 3600.0)
    assert build_verdict(ledger, RUN, {AUTHORS[0]: 0}, {}, horizon=3).after == {AUTHORS[0]: 0}
    ledger.close()
