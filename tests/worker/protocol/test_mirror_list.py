"""The mirror list: which list succeeds which, in any order of arrival."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import MirrorListError
from barnraise.protocol import mirror_list
from barnraise.protocol.mirror_list import (
    Expulsion,
    MirrorEntry,
    MirrorList,
    SignedMirrorList,
    add_signature,
    lists_after,
    merge_chain,
    rank_mirrors,
    unsigned_list,
)
from barnraise.protocol.signing import Identity

ROOTS = [Identity(bytes([n]) * 32) for n in range(1, 7)]
NOW, YEAR = 1_800_000_000.0, 31_536_000.0


def mirror(n: int, **fields) -> MirrorEntry:
    key = Identity(bytes([100 + n]) * 32).key
    return MirrorEntry(
        key=key, url=f"https://m{n}.example.org", name=f"Mirror {n}", admitted=NOW, **fields
    )


def signed_list(
    version: int,
    *,
    roots=(0, 1, 2),
    threshold=2,
    signers=(0, 1),
    has=(1, 2, 3),
    expires=NOW + YEAR,
    **fields,
):
    listed = fields.get("mirrors") or [mirror(n) for n in has]
    keys = [ROOTS[n].key for n in roots]
    said = MirrorList(
        version=version, expires=expires, threshold=threshold, roots=keys, mirrors=listed
    )
    words = [ROOTS[n].sign("mirror_list", said) for n in signers]
    return unsigned_list(said).model_copy(
        update={"signatures": {word.key: word.signature for word in words}}
    )


FIRST = signed_list(1)


def first_chain() -> list[SignedMirrorList]:
    return merge_chain([], [FIRST], NOW, FIRST.digest)


def refused(told: SignedMirrorList, held=None) -> str:
    """Return the refusal's sentence, and check that the stored chain did not change."""
    held = first_chain() if held is None else held
    before = list(held)
    with pytest.raises(MirrorListError) as found:
        merge_chain(held, [told], NOW)
    assert held == before
    return str(found.value)


def test_newer_list_signed_by_enough_roots_replaces_the_previous_one():
    chain = merge_chain(first_chain(), [signed_list(2, has=(1, 2, 3, 4))], NOW)
    assert (
        mirror_list.parse_list(chain[-1]).version == 2
        and len(mirror_list.parse_list(chain[-1]).mirrors) == 4
    )


def test_first_list_is_the_one_that_a_trusted_mirror_names():
    with pytest.raises(MirrorListError, match="is not"):
        merge_chain([], [FIRST], NOW, "0" * 64)
    alone = signed_list(1, signers=(0,))
    with pytest.raises(MirrorListError, match="signed by 1 of the roots"):
        merge_chain([], [alone], NOW, alone.digest)
    assert merge_chain([], [FIRST], NOW, FIRST.digest) == [FIRST]


def test_expired_list_is_refused_with_its_age():
    assert refused(signed_list(2, expires=NOW - 86400)) == "the mirror list 2 expired 1.0 days ago"
    with pytest.raises(MirrorListError, match="expired"):
        merge_chain([], [signed_list(1, expires=NOW)], NOW, signed_list(1, expires=NOW).digest)


def test_list_with_too_few_signatures_is_refused_with_their_number():
    assert "signed by 1 of the roots of list 1, and 2 must" in refused(signed_list(2, signers=(2,)))
    assert "signed by 0 of the roots" in refused(signed_list(2, signers=()))


def test_list_with_a_foreign_or_false_signature_is_refused():
    assert "a stranger" in refused(signed_list(2, signers=(0, 1, 5)))
    good = signed_list(2)
    false = good.model_copy(update={"signatures": {**good.signatures, ROOTS[2].key: "0" * 128}})
    assert f"the signature of {ROOTS[2].key[:8]} does not match" in refused(false)
    altered = good.model_copy(update={"body": good.body.replace("Mirror 1", "Mirror 9")})
    assert "does not match" in refused(altered)


def test_new_roots_need_signatures_of_old_and_new_roots():
    assert "of the roots of list 1" in refused(signed_list(2, roots=(3, 4, 5), signers=(3, 4)))
    assert "of its own roots" in refused(signed_list(2, roots=(3, 4, 5), signers=(0, 1, 3)))
    chain = merge_chain(first_chain(), [signed_list(2, roots=(3, 4, 5), signers=(0, 1, 3, 4))], NOW)
    assert "of the roots of list 2" in refused(signed_list(3, signers=(0, 1)), chain)
    assert "stranger" in refused(signed_list(3, roots=(3, 4, 5), signers=(0, 3, 4)), chain)


def test_older_list_and_second_list_of_one_version_are_refused():
    chain = merge_chain(first_chain(), [signed_list(3)], NOW)
    assert (
        refused(signed_list(2), chain) == "the mirror list 2 is older than 3, which is held already"
    )
    assert refused(signed_list(3, has=(1, 2)), chain).startswith(
        "there are two different mirror lists 3"
    )


def test_expelled_mirror_stays_listed_and_returns_only_with_a_new_key():
    gone = mirror(
        3,
        expelled=Expulsion(
            at=NOW, last={"a" * 32: 41}, reason="it signed two events with one number"
        ),
    )
    chain = merge_chain(first_chain(), [signed_list(2, mirrors=[mirror(1), mirror(2), gone])], NOW)
    assert (
        mirror_list.parse_list(chain[-1]).expelled == {gone.key}
        and gone.key in mirror_list.parse_list(chain[-1]).keys
    )
    assert "takes back" in refused(signed_list(3), chain)
    assert "says nothing of the mirror" in refused(signed_list(3, has=(1, 2)), chain)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"roots": (0, 0), "signers": (0,)}, "one root twice"),
        ({"threshold": 3, "roots": (0, 1)}, "asks for 3 of 2 roots"),
        ({"has": (1, 1)}, "one mirror twice"),
        ({"mirrors": [mirror(1, expelled=Expulsion(at=NOW))]}, "leaves no mirror"),
    ],
)
def test_inconsistent_list_is_refused(changed, sentence):
    assert sentence in refused(signed_list(2, **changed))


@pytest.mark.parametrize("body", ["", "{}", "[]", "<html>", '{"version": 0}', "é" * 9_000])
def test_malformed_list_is_refused(body):
    with pytest.raises(MirrorListError, match=r"malformed|more than 14,000 bytes"):
        mirror_list.parse_list(SignedMirrorList.model_construct(body=body, signatures={}))


@pytest.mark.parametrize(
    "url", ["ftp://a.b", "https://a b", "javascript:alert(1)", "https://u:p@host", "https://a/?x"]
)
def test_malformed_address_is_refused(url):
    with pytest.raises(ValueError, match="url"):
        MirrorEntry(key="0" * 64, url=url, name="m", admitted=NOW)


# ---- chains, in whatever order


def history(turns: list[bool]) -> list[SignedMirrorList]:
    """Return a list for each element; True: it changes the roots."""
    found, which = [FIRST], 0
    for version, turn in enumerate(turns, start=2):
        old, which = (which, (which + 1) % 2) if turn else (which, which)
        mine = (0, 1) if which == 0 else (3, 4)
        signers = {*mine, *((0, 1) if old == 0 else (3, 4))}
        found.append(
            signed_list(
                version, roots=(0, 1, 2) if which == 0 else (3, 4, 5), signers=sorted(signers)
            )
        )
    return found


@given(turns=st.lists(st.booleans(), max_size=9), seed=st.integers(0, 2**32))
def test_chains_received_in_any_order_end_at_the_newest_list(turns, seed):
    """Deliver the chain of every list in the history, in random order and twice."""
    whole, chains = history(turns), []
    held = first_chain()
    for signed in whole:
        held = merge_chain(held, [signed], NOW)
        chains.append(held)
    order = chains * 2
    random.Random(seed).shuffle(order)
    mine = first_chain()
    for chain in order:
        version = mirror_list.parse_list(mine[-1]).version
        told = [each for each in chain if mirror_list.parse_list(each).version > version]
        if told:
            mine = merge_chain(mine, told, NOW)
        assert mirror_list.parse_list(mine[-1]).version >= version, "never back"
    assert mine[-1] == whole[-1]


@given(turns=st.lists(st.booleans(), max_size=5), start=st.integers(0, 5))
def test_absent_reader_needs_only_the_lists_that_changed_roots(turns, start):
    whole = history(turns)
    held = first_chain()
    for signed in whole:
        held = merge_chain(held, [signed], NOW)
    away = [whole[min(start, len(turns))]]
    told = lists_after(held, mirror_list.parse_list(away[-1]).version)
    assert not told or merge_chain(away, told, NOW)[-1] == whole[-1]
    assert len(held) <= 2 + sum(turns), "of the others only the newest is kept"


def test_expired_lists_may_lead_to_a_valid_one():
    turn = signed_list(2, roots=(3, 4, 5), signers=(0, 1, 3, 4), expires=NOW - 5)
    newest = signed_list(3, roots=(3, 4, 5), signers=(3, 4))
    assert merge_chain(first_chain(), [turn, newest], NOW)[-1] == newest
    assert "expired" in refused(turn)


def test_longest_chain_fits_into_one_frame():
    long = [mirror(n).model_copy(update={"name": '"' * 100}) for n in range(27)]
    lists = [signed_list(n, mirrors=long) for n in range(1, mirror_list.MAX_LISTS_PER_MESSAGE + 1)]
    assert len(lists[0].body.encode()) > 9_000
    assert len(mirror_list.MirrorLists(lists=lists).model_dump_json()) < 1 << 18


# ---- who reports where


@given(machines=st.integers(0, 2**32))
def test_machine_preference_is_stable_when_a_mirror_goes(machines):
    listed = [mirror(n) for n in range(5)]
    order = rank_mirrors(f"{machines:064x}", listed)
    assert sorted(order, key=lambda m: m.url) == sorted(listed, key=lambda m: m.url)
    assert rank_mirrors(f"{machines:064x}", listed[::-1]) == order
    without = rank_mirrors(f"{machines:064x}", [m for m in listed if m != order[2]])
    assert without == [m for m in order if m != order[2]]


def test_machines_spread_evenly_over_the_mirrors():
    listed = [mirror(n) for n in range(4)]
    first = [rank_mirrors(Identity(n.to_bytes(32, "big")).key, listed)[0].key for n in range(400)]
    counts = [len(list(group)) for _, group in itertools.groupby(sorted(first))]
    assert len(counts) == 4 and min(counts) > 60


def test_only_a_list_as_this_version_writes_it_can_be_signed():
    plain = unsigned_list(mirror_list.parse_list(FIRST))
    assert add_signature(ROOTS[0], plain).signatures.keys() == {ROOTS[0].key}
    later = SignedMirrorList(body=plain.body[:-1] + ',"colour":"red"}')
    with pytest.raises(MirrorListError, match="another version"):
        add_signature(ROOTS[0], later)
