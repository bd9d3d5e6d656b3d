"""Tests of the anchor: equal sets of updates give equal bits in any order, and can be undone."""

import hypothesis.strategies as st
import pytest
import torch
from helpers.updates.headers import build_update
from hypothesis import given, settings
from memory_anchor import MemoryAnchor

from barnraise.ledger.anchor import (
    TokenClaim,
    add_sketches,
    compute_sketch,
    count_tokens,
    fragment_from_bytes,
    fragment_to_bytes,
    initial_weights,
)
from barnraise.ledger.codec import decode, encode
from barnraise.protocol.messages import Update
from barnraise.spec import UNIT_BITS, ModelSpec, preset

TINY = ModelSpec(layers=1, width=16, heads=1, context=8, vocabulary=256)
GOLDEN = "a5b98ba56af06ad3ad22dcf30475c3c4a5ede6e02be7803990a7d267bb0458a9"


def update(author: str, seq: int) -> Update:
    return build_update(author * 64, seq)


def units(seed: int) -> list[torch.Tensor]:
    """Return an update's integers as a receiver decodes them."""
    noise = torch.Generator().manual_seed(seed)
    parts = []
    for fragment in TINY.fragments():
        values = torch.randint(
            -(2**31), 2**31 - 1, (fragment.size,), dtype=torch.int32, generator=noise
        )
        parts.append(decode(encode(values)[0], fragment.size))
    return parts


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_anchor_any_order_and_duplication_gives_identical_integers(data):
    identities = [(author, seq) for author in "abc" for seq in (1, 2, 3)]
    deliveries = data.draw(st.lists(st.sampled_from(identities), max_size=30)) + data.draw(
        st.permutations(identities)
    )
    anchor, waiting = MemoryAnchor.from_seed(TINY, 3), set()
    for delivered in deliveries:
        waiting.add(delivered)
        while ready := [
            (author, seq) for author, seq in waiting if seq == last_seq(anchor, author) + 1
        ]:
            add_update(anchor, *ready[0])
            anchor.record(update(*ready[0]))
        waiting = {(author, seq) for author, seq in waiting if seq > last_seq(anchor, author)}
    in_order = MemoryAnchor.from_seed(TINY, 3)
    for author, seq in identities:
        add_update(in_order, author, seq)
    assert anchor.digest() == in_order.digest()
    assert anchor.tokens == 90


def last_seq(anchor: MemoryAnchor, author: str) -> int:
    return anchor.vector.get(f"{author * 64}.{'0' * 16}", 0)


def add_update(anchor: MemoryAnchor, author: str, seq: int) -> None:
    """Add an update of noise that depends on its author and number."""
    for index, part in enumerate(units(seed=ord(author) * 100 + seq)):
        anchor.add_units(index, part)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=64, max_size=64), st.integers(0, 2**31))
def test_anchor_add_then_subtract_restores_integers_past_overflow(values, seed):
    anchor = MemoryAnchor([torch.tensor(values, dtype=torch.int32)])
    before, part = anchor.fragments[0].clone(), torch.full((64,), seed % 2**31, dtype=torch.int32)
    anchor.add_units(0, part)
    wrapped = [(v + seed % 2**31 + 2**31) % 2**32 - 2**31 for v in values]
    assert anchor.fragments[0].tolist() == wrapped
    anchor.add_units(0, -part)
    assert torch.equal(anchor.fragments[0], before)


def test_initial_weights_equal_the_golden_digest():
    assert MemoryAnchor.from_seed(preset("gpt-nano"), 7).digest() == GOLDEN


def test_initial_weights_differ_by_seed_fragment_and_slot():
    first, second = TINY.fragments()[0], TINY.fragments()[1]
    assert not torch.equal(initial_weights(first, 1), initial_weights(first, 2))
    qkv, up = (
        next(s for s in second.slots if s.name == name) for name in ("qkv.weight", "up.weight")
    )
    weights = initial_weights(second, 1)
    of_qkv, of_up = (weights[slot.offset : slot.offset + 64] for slot in (qkv, up))
    assert not torch.equal(of_qkv, of_up)


def test_initial_weights_follow_each_slots_deviation_ones_and_zeros():
    for fragment in preset("gpt-nano").fragments():
        weights, covered = initial_weights(fragment, 5), 0
        for slot in fragment.slots:
            part = weights[slot.offset : slot.offset + slot.size].double()
            covered += int(part.count_nonzero())
            if slot.initial == "normal":
                assert float(part.std()) == pytest.approx(slot.deviation, rel=0.02)
                assert abs(float(part.mean())) < slot.deviation * 5 / slot.size**0.5
            else:
                constant = float(1 << UNIT_BITS) if slot.initial == "ones" else 0.0
                assert set(part.tolist()) == {constant}
        assert covered == int(weights.count_nonzero()), "padding is zero"


@given(st.lists(st.integers(-(2**28), 2**28), min_size=1, max_size=50), st.integers(1, 2**28))
def test_sketch_of_a_sum_is_the_sum_of_sketches(values, other):
    a = torch.tensor(values, dtype=torch.int32)
    b = torch.full_like(a, other)
    assert compute_sketch(a + b) == add_sketches(compute_sketch(a), compute_sketch(b))


def test_sketch_detects_flipped_bit_and_swapped_elements_past_one_block():
    values = torch.arange((1 << 20) + 10, dtype=torch.int32)
    flipped, swapped = values.clone(), values.clone()
    flipped[-1] ^= 1 << 30
    swapped[5], swapped[(1 << 20) + 5] = values[(1 << 20) + 5], values[5]
    assert len({compute_sketch(values), compute_sketch(flipped), compute_sketch(swapped)}) == 3


def test_anchor_update_out_of_order_raises_assertion():
    with pytest.raises(AssertionError):
        MemoryAnchor.from_seed(TINY, 1).record(update("a", 2))


def test_fragment_bytes_round_trip():
    fragment = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert torch.equal(fragment_from_bytes(bytes(fragment_to_bytes(fragment))), fragment)


RATE = 7  # tokens a millisecond that the tickets in these tests allow
KEY, OTHER_KEY = "a" * 64, "b" * 64


def author(incarnation: int, key: str = KEY) -> str:
    return f"{key}.{incarnation:016x}"


@st.composite
def claims_within_the_rate(draw) -> TokenClaim:
    """Draw what an incarnation states that uses its ticket as far as it allows, or less far."""
    started = draw(st.integers(0, 500))
    duration = draw(st.integers(1, 300))
    return TokenClaim(started, started + duration, draw(st.integers(0, RATE * duration)))


def covered_milliseconds(claims: list[TokenClaim]) -> int:
    """Return the length of the union of the claims' times."""
    return len({ms for claim in claims for ms in range(claim.started_ms, claim.time_ms)})


@given(st.lists(claims_within_the_rate(), max_size=8))
def test_many_incarnations_of_one_key_state_no_more_than_one(claims):
    of_one_key = {author(number): claim for number, claim in enumerate(claims)}
    assert 0 <= count_tokens(of_one_key) <= RATE * covered_milliseconds(claims)


@given(st.lists(st.tuples(st.integers(-5000, 900), st.integers(1, 1000)), max_size=8), st.data())
def test_header_times_of_many_incarnations_state_no_time_twice(times, data):
    """A start long before the ticket, and a renewal at twice the rate, gain nothing.

    A ticket of RATE is issued at 0, and one of twice that at 500.
    """
    claims = {}
    for number, (started, time) in enumerate(times):
        first_ms, renewed_ms = max(0, started), max(500, started)
        before = RATE * max(0, min(time, 500) - first_ms)
        most = before + 2 * RATE * max(0, time - renewed_ms)
        if started < time:
            claim = TokenClaim(started, time, data.draw(st.integers(most // 2, most)))
            claims[author(number)] = claim
    last = max((claim.time_ms for claim in claims.values()), default=0)
    assert count_tokens(claims) <= RATE * min(last, 500) + 2 * RATE * max(0, last - 500)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=8), st.data())
def test_incarnations_that_follow_each_other_count_completely(durations, data):
    claims, start, total = {}, 0, 0
    for number, (duration, pause) in enumerate(durations):
        tokens = data.draw(st.integers(0, RATE * duration))
        claims[author(number)] = TokenClaim(start, start + duration, tokens)
        start += duration + pause
        total += tokens
    assert count_tokens(claims) == total


@given(st.lists(claims_within_the_rate(), max_size=6), st.randoms(use_true_random=False))
def test_count_is_the_same_in_any_order_of_arrival(claims, random):
    entries = [(author(n, KEY if n % 2 else OTHER_KEY), claim) for n, claim in enumerate(claims)]
    expected = count_tokens(dict(entries))
    random.shuffle(entries)
    assert count_tokens(dict(entries)) == expected


def test_overlapping_incarnations_count_each_moment_once():
    claims = {author(1): TokenClaim(0, 1000, 7000), author(2): TokenClaim(500, 1500, 7000)}
    assert count_tokens(claims) == 10_500
    copies = {author(number): TokenClaim(0, 1000, 7000) for number in range(100)}
    assert count_tokens(copies) == 7000


@settings(max_examples=50)
@given(
    st.lists(claims_within_the_rate(), max_size=5), st.lists(claims_within_the_rate(), max_size=5)
)
def test_other_keys_do_not_change_a_keys_count(ours, theirs):
    own = {author(number): claim for number, claim in enumerate(ours)}
    others = {author(number, OTHER_KEY): claim for number, claim in enumerate(theirs)}
    assert count_tokens(own | others) == count_tokens(own) + count_tokens(others)
