"""Mirror lists: which list may follow which, in any order of arrival."""

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


def signed_list(version: int, *, roots=(0, 1, 2), signers=(0, 1), numbers=(1, 2, 3), **fields):
    """Sign a mirror list.

    Args:
        version: The list's version.
        roots: Which of ROOTS may sign the next list.
        signers: Which of ROOTS sign this one.
        numbers: The mirrors in the list, unless `fields` contains `mirrors`.
        fields: Fields that differ from the defaults.
    """
    defaults = {
        "expires": NOW + YEAR,
        "threshold": 2,
        "mirrors": [mirror(number) for number in numbers],
    }
    keys = [ROOTS[number].key for number in roots]
    unsigned = MirrorList(version=version, roots=keys, **(defaults | fields))
    signatures = [ROOTS[number].sign("mirror_list", unsigned) for number in signers]
    return unsigned_list(unsigned).model_copy(
        update={"signatures": {signed.key: signed.signature for signed in signatures}}
    )


FIRST = signed_list(1)


def first_chain() -> list[SignedMirrorList]:
    return merge_chain([], [FIRST], NOW, FIRST.digest)


def refusal(received: SignedMirrorList, stored: list[SignedMirrorList] | None = None) -> str:
    """Return the sentence of a refusal, and check that the stored chain did not change."""
    stored = first_chain() if stored is None else stored
    before = list(stored)
    with pytest.raises(MirrorListError) as caught:
        merge_chain(stored, [received], NOW)
    assert stored == before
    return str(caught.value)


def test_newer_list_signed_by_enough_roots_replaces_the_previous_one():
    chain = merge_chain(first_chain(), [signed_list(2, numbers=(1, 2, 3, 4))], NOW)
    assert mirror_list.parse_list(chain[-1]).version == 2
    assert len(mirror_list.parse_list(chain[-1]).mirrors) == 4


def test_first_list_is_the_one_that_a_trusted_mirror_names():
    with pytest.raises(MirrorListError, match="is not"):
        merge_chain([], [FIRST], NOW, "0" * 64)
    alone = signed_list(1, signers=(0,))
    with pytest.raises(MirrorListError, match="signed by 1 of the roots"):
        merge_chain([], [alone], NOW, alone.digest)
    assert merge_chain([], [FIRST], NOW, FIRST.digest) == [FIRST]


def test_expired_list_is_refused_with_its_age():
    assert refusal(signed_list(2, expires=NOW - 86400)) == "the mirror list 2 expired 1.0 days ago"
    with pytest.raises(MirrorListError, match="expired"):
        merge_chain([], [signed_list(1, expires=NOW)], NOW, signed_list(1, expires=NOW).digest)


def test_list_with_too_few_signatures_is_refused_with_their_number():
    assert "signed by 1 of the roots of list 1, and 2 must" in refusal(signed_list(2, signers=(2,)))
    assert "signed by 0 of the roots" in refusal(signed_list(2, signers=()))


def test_list_with_a_foreign_or_false_signature_is_refusal():
    assert "a stranger" in refusal(signed_list(2, signers=(0, 1, 5)))
    good = signed_list(2)
    false = good.model_copy(update={"signatures": {**good.signatures, ROOTS[2].key: "0" * 128}})
    assert f"the signature of {ROOTS[2].key[:8]} does not match" in refusal(false)
    altered = good.model_copy(update={"body": good.body.replace("Mirror 1", "Mirror 9")})
    assert "does not match" in refusal(altered)


def test_new_roots_need_signatures_of_old_and_new_roots():
    assert "of the roots of list 1" in refusal(signed_list(2, roots=(3, 4, 5), signers=(3, 4)))
    assert "of its own roots" in refusal(signed_list(2, roots=(3, 4, 5), signers=(0, 1, 3)))
    chain = merge_chain(first_chain(), [signed_list(2, roots=(3, 4, 5), signers=(0, 1, 3, 4))], NOW)
    assert "of the roots of list 2" in refusal(signed_list(3, signers=(0, 1)), chain)
    assert "stranger" in refusal(signed_list(3, roots=(3, 4, 5), signers=(0, 3, 4)), chain)


def test_older_list_and_second_list_of_one_version_are_refusal():
    chain = merge_chain(first_chain(), [signed_list(3)], NOW)
    assert (
        refusal(signed_list(2), chain) == "the mirror list 2 is older than 3, which is held already"
    )
    assert refusal(signed_list(3, numbers=(1, 2)), chain).startswith(
        "there are two different mirror lists 3"
    )


def test_expelled_mirror_stays_listed_and_returns_only_with_a_new_key():
    expulsion = Expulsion(
        at=NOW, last={"a" * 32: 41}, reason="it signed two events with one number"
    )
    expelled = mirror(3, expelled=expulsion)
    newer = signed_list(2, mirrors=[mirror(1), mirror(2), expelled])
    chain = merge_chain(first_chain(), [newer], NOW)
    newest = mirror_list.parse_list(chain[-1])
    assert newest.expelled == {expelled.key} and expelled.key in newest.keys
    assert "takes back" in refusal(signed_list(3), chain)
    assert "says nothing of the mirror" in refusal(signed_list(3, numbers=(1, 2)), chain)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"roots": (0, 0), "signers": (0,)}, "one root twice"),
        ({"threshold": 3, "roots": (0, 1)}, "asks for 3 of 2 roots"),
        ({"numbers": (1, 1)}, "one mirror twice"),
        ({"mirrors": [mirror(1, expelled=Expulsion(at=NOW))]}, "leaves no mirror"),
    ],
)
def test_inconsistent_list_is_refusal(changed, sentence):
    assert sentence in refusal(signed_list(2, **changed))


@pytest.mark.parametrize("body", ["", "{}", "[]", "<html>", '{"version": 0}', "é" * 9_000])
def test_malformed_list_is_refusal(body):
    with pytest.raises(MirrorListError, match=r"malformed|more than 14,000 bytes"):
        mirror_list.parse_list(SignedMirrorList.model_construct(body=body, signatures={}))


@pytest.mark.parametrize(
    "url", ["ftp://a.b", "https://a b", "javascript:alert(1)", "https://u:p@host", "https://a/?x"]
)
def test_malformed_address_is_refusal(url):
    with pytest.raises(ValueError, match="url"):
        MirrorEntry(key="a" * 64, url=url, name="m", admitted=NOW)


# ---- chains in any order


def history(root_changes: list[bool]) -> list[SignedMirrorList]:
    """Return the first list and one for each element; an element says whether the roots change."""
    lists = [FIRST]
    roots, other_roots = (0, 1, 2), (3, 4, 5)
    for version, changes_roots in enumerate(root_changes, start=2):
        signers = {*roots[:2]}
        if changes_roots:
            roots, other_roots = other_roots, roots
            signers |= {*roots[:2]}
        lists.append(signed_list(version, roots=roots, signers=sorted(signers)))
    return lists


@given(root_changes=st.lists(st.booleans(), max_size=9), seed=st.integers(0, 2**32))
def test_chains_received_in_any_order_end_at_the_newest_list(root_changes, seed):
    """Deliver the chain of every list in the history, in random order and twice."""
    lists, chains = history(root_changes), []
    chain = first_chain()
    for signed in lists:
        chain = merge_chain(chain, [signed], NOW)
        chains.append(chain)
    deliveries = chains * 2
    random.Random(seed).shuffle(deliveries)
    stored = first_chain()
    for chain in deliveries:
        version = mirror_list.parse_list(stored[-1]).version
        newer = [signed for signed in chain if mirror_list.parse_list(signed).version > version]
        if newer:
            stored = merge_chain(stored, newer, NOW)
        assert mirror_list.parse_list(stored[-1]).version >= version, "never an older list"
    assert stored[-1] == lists[-1]


@given(root_changes=st.lists(st.booleans(), max_size=5), start=st.integers(0, 5))
def test_absent_reader_needs_only_the_lists_that_changed_roots(root_changes, start):
    lists = history(root_changes)
    chain = first_chain()
    for signed in lists:
        chain = merge_chain(chain, [signed], NOW)
    absent = [lists[min(start, len(root_changes))]]
    missing = lists_after(chain, mirror_list.parse_list(absent[-1]).version)
    assert not missing or merge_chain(absent, missing, NOW)[-1] == lists[-1]
    assert len(chain) <= 2 + sum(root_changes), "of the other lists only the newest is stored"


def test_expired_lists_may_lead_to_a_valid_one():
    new_roots = signed_list(2, roots=(3, 4, 5), signers=(0, 1, 3, 4), expires=NOW - 5)
    newest = signed_list(3, roots=(3, 4, 5), signers=(3, 4))
    assert merge_chain(first_chain(), [new_roots, newest], NOW)[-1] == newest
    assert "expired" in refusal(new_roots)


def test_longest_chain_fits_into_one_frame():
    long = [mirror(n).model_copy(update={"name": '"' * 100}) for n in range(27)]
    lists = [signed_list(n, mirrors=long) for n in range(1, mirror_list.MAX_LISTS_PER_MESSAGE + 1)]
    assert len(lists[0].body.encode()) > 9_000
    assert len(mirror_list.MirrorLists(lists=lists).model_dump_json()) < 1 << 18


# ---- the preference of a machine


@given(number=st.integers(0, 2**32))
def test_machine_preference_is_stable_when_a_mirror_leaves(number):
    listed = [mirror(n) for n in range(5)]
    order = rank_mirrors(f"{number:064x}", listed)
    assert sorted(order, key=lambda m: m.url) == sorted(listed, key=lambda m: m.url)
    assert rank_mirrors(f"{number:064x}", listed[::-1]) == order
    without = rank_mirrors(f"{number:064x}", [m for m in listed if m != order[2]])
    assert without == [m for m in order if m != order[2]]


def test_machines_spread_evenly_over_the_mirrors():
    listed = [mirror(n) for n in range(4)]
    first = [rank_mirrors(Identity(n.to_bytes(32, "big")).key, listed)[0].key for n in range(400)]
    counts = [len(list(group)) for _, group in itertools.groupby(sorted(first))]
    assert len(counts) == 4 and min(counts) > 60


def test_signature_needs_a_list_in_the_form_of_this_version():
    plain = unsigned_list(mirror_list.parse_list(FIRST))
    assert add_signature(ROOTS[0], plain).signatures.keys() == {ROOTS[0].key}
    later = SignedMirrorList(body=plain.body[:-1] + ',"colour":"red"}')
    with pytest.raises(MirrorListError, match="another version"):
        add_signature(ROOTS[0], later)
