"""Tests of what an update may state under its ticket: property tests, and the attacks by name."""

import hypothesis.strategies as st
import pytest
from helpers.updates import headers, tickets
from hypothesis import given, settings

from barnraise.errors import MessageError
from barnraise.ledger.ledger import Ledger, LedgerHead, Outcome
from barnraise.ledger.validation import UpdateRules, allowed_tokens, validate_claim, validate_header
from barnraise.planning.update_header import max_crew_members, max_header_bytes
from barnraise.protocol import messages
from barnraise.protocol.enums import Standing
from barnraise.protocol.signing import ORPHANED_TICKET_GRACE_SECONDS, Identity, digest
from barnraise.spec import ModelSpec, RunSpec

RUN = tickets.RUN
AUTHOR, MIRROR = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
SPEC = RunSpec(ModelSpec(1, 16, 1, 8, 256), roots=(MIRROR.key,))
RULES = UpdateRules.from_spec(SPEC, RUN, frozenset([MIRROR.key]))
ISSUED = 1_000_000.0  # when the tickets are issued, in seconds
ISSUED_MS = 1_000_000_000


def sign_ticket(rate: int = 1000, issued: float = ISSUED) -> messages.Signed:
    return tickets.sign_ticket(MIRROR, AUTHOR.key, max_tokens_per_second=rate, issued=issued)


def parse_ticket(signed: messages.Signed) -> messages.Ticket:
    return messages.Ticket.model_validate_json(signed.body)


def build_update(
    time_ms: int,
    tokens: int = 0,
    started_ms: int = ISSUED_MS,
    ticket: messages.Signed | None = None,
    **changed,
) -> messages.Update:
    fields = {
        "tokens": tokens,
        "started_ms": started_ms,
        "time_ms": time_ms,
        "ticket": digest((ticket or sign_ticket()).body),
        "fragments": [headers.PART] * len(RULES.sizes),
    }
    return headers.build_update(AUTHOR.key, **(fields | changed))


def validate(update: messages.Update, ticket: messages.Signed | None = None) -> messages.Update:
    return validate_header(AUTHOR.sign("update", update), ticket or sign_ticket(), RULES)


def test_123_updates_in_one_second_cannot_end_a_run():
    """The attack of the review: every update stated the most tokens that one update may."""
    budget = 5_000_000
    ticket = parse_ticket(sign_ticket(rate=6_000))
    previous_ms, stated = ISSUED_MS, 0
    for number in range(123):
        time_ms = ISSUED_MS + 8 * (number + 1)
        tokens = allowed_tokens(ticket, previous_ms, time_ms)
        with pytest.raises(MessageError, match="states"):
            validate_claim(build_update(time_ms, budget // 123), ticket, previous_ms)
        validate_claim(build_update(time_ms, tokens), ticket, previous_ms)
        previous_ms, stated = time_ms, stated + tokens
    assert stated <= 6_000, "one second of an honest machine of this class"


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 50_000)), max_size=20))
def test_chain_of_valid_updates_states_at_most_rate_times_time(steps):
    ticket = parse_ticket(sign_ticket())
    previous_ms, stated = ISSUED_MS, 0
    for elapsed_ms, tokens in steps:
        update = build_update(previous_ms + elapsed_ms, tokens)
        try:
            validate_claim(update, ticket, previous_ms)
        except MessageError:
            continue
        previous_ms = update.time_ms
        stated += tokens
    assert stated <= ticket.max_tokens_per_second * (previous_ms - ISSUED_MS) / 1000


def test_header_whose_time_descends_is_refused(tmp_path):
    ticket = parse_ticket(sign_ticket())
    for time_ms in (ISSUED_MS + 500, ISSUED_MS + 1000):
        with pytest.raises(MessageError, match="not later"):
            validate_claim(build_update(time_ms), ticket, previous_ms=ISSUED_MS + 1000)
    ledger = Ledger(tmp_path)
    first = build_update(ISSUED_MS + 1000, fragments=[])
    signed = AUTHOR.sign("update", first)
    assert ledger.append(signed, first) is Outcome.ADDED
    changes = {"seq": 2, "previous": digest(signed.body), "fragments": []}
    for time_ms, started_ms in [(ISSUED_MS + 1000, ISSUED_MS), (ISSUED_MS + 2000, ISSUED_MS + 1)]:
        second = build_update(time_ms, started_ms=started_ms, **changes)
        assert ledger.append(AUTHOR.sign("update", second), second) is Outcome.INCONSISTENT
    second = build_update(ISSUED_MS + 2000, **changes)
    assert ledger.append(AUTHOR.sign("update", second), second) is Outcome.ADDED
    ledger.close()


@pytest.mark.parametrize("seconds", [-0.001, 86_400 + ORPHANED_TICKET_GRACE_SECONDS + 0.001])
def test_header_of_a_time_outside_its_tickets_is_refused(seconds):
    with pytest.raises(MessageError, match="for which its ticket is not valid"):
        validate(build_update(ISSUED_MS + round(1000 * seconds), started_ms=0))


def test_renewed_ticket_with_a_higher_rate_applies_to_no_time_before_it():
    ticket = sign_ticket(rate=1_000_000)
    idle_before = build_update(ISSUED_MS + 1000, 60_000_000, started_ms=0, ticket=ticket)
    with pytest.raises(MessageError, match="ticket and its time allow 1,000,000"):
        validate(idle_before, ticket)
    assert allowed_tokens(parse_ticket(ticket), 0, ISSUED_MS + 1000) == 1_000_000


@pytest.mark.parametrize("standing", Standing)
def test_newcomer_that_states_another_standing_than_its_ticket_is_refused(standing):
    ticket = tickets.sign_ticket(MIRROR, AUTHOR.key, standing=standing, issued=ISSUED)
    for newcomer in (True, False):
        update = build_update(ISSUED_MS + 1000, ticket=ticket, newcomer=newcomer)
        update = update.model_copy(update={"volunteer": parse_ticket(ticket).volunteer})
        if newcomer is (standing is Standing.NEWCOMER):
            assert validate(update, ticket) == update
        else:
            with pytest.raises(MessageError, match="another standing than its ticket"):
                validate(update, ticket)


# ---- crews


MEMBERS = sorted(Identity(bytes([number]) * 32).key for number in range(10, 26))


def crew_of(*tokens: int) -> list[messages.CrewShare]:
    return [
        messages.CrewShare(key=key, tokens=each) for key, each in zip(MEMBERS, tokens, strict=False)
    ]


@pytest.mark.parametrize(
    ("crew", "reason"),
    [
        (crew_of(60, 41), "states 101 tokens of its crew's members, and 100 in all"),
        (crew_of(1, 2)[::-1], "once, in order"),
        (crew_of(1) * 2, "once, in order"),
        ([messages.CrewShare(key=AUTHOR.key, tokens=1)], "each other member"),
    ],
)
def test_crew_that_is_impossible_is_refused_with_the_reason(crew, reason):
    update = build_update(ISSUED_MS + 1000, 100, crew=crew)
    with pytest.raises(MessageError, match=reason):
        validate(update)


def test_crew_of_sixteen_members_is_no_header():
    with pytest.raises(ValueError, match="crew"):
        build_update(ISSUED_MS + 1000, 100, crew=crew_of(*[1] * 16))


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 60), max_size=2), total=st.integers(1, 500))
def test_crew_counts_exactly_if_its_tokens_fit_the_total(tokens, total):
    update = build_update(ISSUED_MS + 1000, total, crew=crew_of(*tokens))
    if sum(tokens) <= total:
        assert validate(update) == update
    else:
        with pytest.raises(MessageError, match="of its crew"):
            validate(update)


@settings(max_examples=60, deadline=None)
@given(before=st.lists(st.integers(0, 9), max_size=15), after=st.lists(st.integers(0, 9)))
def test_crew_never_shrinks_from_one_update_to_the_next(before, after):
    first = build_update(ISSUED_MS + 1000, 500, crew=crew_of(*before))
    head = LedgerHead.from_update(AUTHOR.sign("update", first), first)
    second = build_update(ISSUED_MS + 2000, 500, total=1000, crew=crew_of(*after[:15]))
    padded = (after + [0] * 15)[:15]
    grows = all(new >= old for old, new in zip(before, padded, strict=False))
    assert head.is_continued_by(second) == grows


@pytest.mark.parametrize("fragments", range(3, 20))
def test_header_of_a_crew_is_no_longer_than_earlier_versions_allow(fragments):
    update = build_update(
        2_000_000_000_000,
        1 << 33,
        crew=[
            messages.CrewShare(key=key, tokens=1 << 46)
            for key in MEMBERS[: max_crew_members(fragments)]
        ],
        fragments=[headers.PART.model_copy(update={"size": 1 << 33})] * fragments,
        total=1 << 50,
        seq=1 << 30,
    )
    assert len(update.model_dump_json()) <= max_header_bytes(fragments)
