"""Tests of the ledger and the validation of updates."""

import contextlib
import os
import sqlite3
import tempfile
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from helpers.effort import examples
from helpers.updates.headers import PART, sign_chain
from helpers.updates.tickets import sign_ticket
from hypothesis import given, settings

from barnraise.errors import MessageError, StateError
from barnraise.exchange.updates.update_sender import requested_seqs
from barnraise.ledger.anchor import compute_sketch
from barnraise.ledger.codec import encode
from barnraise.ledger.ledger import GENESIS_DIGEST, Ledger, LedgerHead, Outcome, VerdictChange
from barnraise.ledger.validation import (
    EMPTY_PART,
    UpdateRules,
    decode_payload,
    validate_header,
)
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.protocol import messages
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import ModelSpec, RunSpec

RUN = "00000000-0000-7000-8000-000000000001"
OTHER_RUN = "00000000-0000-7000-8000-000000000002"
AUTHOR, MIRROR, STRANGER = (Identity(bytes([n]) * 32) for n in (1, 2, 3))
SPEC = RunSpec(ModelSpec(1, 16, 1, 8, 256), roots=(MIRROR.key,))
RULES = UpdateRules.from_spec(SPEC, RUN, frozenset([MIRROR.key]))


def chain(count: int, identity: Identity = AUTHOR, life: str = "0" * 16):
    """Return signed headers under a ticket of their author."""
    ticket_digest = digest(ticket(identity.key).body)
    return sign_chain(identity, count, incarnation=life, ticket=ticket_digest)


def altered(update: messages.Update, **changed):
    update = update.model_copy(update=changed)
    return AUTHOR.sign("update", update), update


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path)
    yield ledger
    ledger.close()


def test_what_the_event_loop_reads_waits_for_no_writer(ledger, tmp_path):
    """An author's flood of updates keeps the disk's thread writing all the time."""
    headers = chain(3)
    ledger.append(*headers[0])
    other = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # as slow as a disk can be
    writer = threading.Thread(target=ledger.append, args=headers[1], daemon=True)
    writer.start()
    author = headers[0][1].author
    read: list[object] = []

    def read_all() -> None:
        read.append(ledger.classify(*headers[0]))
        read.append(ledger.classify(*headers[2]))
        read.append(ledger.header(author, 1) == headers[0][0])
        read.append((ledger.head(author).seq, ledger.vector(), ledger.tokens))
        ledger.blobs.pin(["a" * 64])
        ledger.blobs.unpin(["a" * 64])

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    reader.join(60)
    is_writing = writer.is_alive()
    other.execute("COMMIT")
    other.close()
    writer.join(60)
    assert is_writing and not reader.is_alive()
    assert read == [Outcome.DUPLICATE, Outcome.GAP, True, (1, {author: 1}, 10)]
    assert ledger.head(author).seq == 2


def test_updates_that_are_appended_together_become_durable_together(ledger, tmp_path):
    headers = chain(5)
    false = altered(headers[3][1], total=7)
    assert ledger.append_all([*headers[:3], false, headers[4]]) == [
        *[Outcome.ADDED] * 3,
        Outcome.INCONSISTENT,
    ]
    author = headers[0][1].author
    assert ledger.vector() == {author: 3} and ledger.tokens == 30
    with contextlib.closing(Ledger(tmp_path, sweep=False)) as second:
        assert second.vector() == {author: 3} and second.tokens == 30


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.data())
def test_ledger_any_order_and_duplication_gives_one_ledger(tmp_path_factory, order, data):
    ledger, headers = Ledger(tmp_path_factory.mktemp("ledger")), chain(6)
    for index in [*order, *range(6)]:
        head = ledger.head(headers[index][1].author).seq
        expected = Outcome.ADDED
        if index != head:
            expected = Outcome.DUPLICATE if index < head else Outcome.GAP
        assert ledger.append(*headers[index]) is expected
    assert ledger.vector() == {headers[0][1].author: 6} and ledger.tokens == 60
    assert [update.seq for _, update in ledger.updates_since({})] == [1, 2, 3, 4, 5, 6]
    ledger.close()


def test_ledger_reopened_has_the_same_content(tmp_path):
    first, headers = Ledger(tmp_path), chain(150)
    for header in headers:
        first.append(*header)
    first.tickets.store(ticket())
    first.close()
    again, author = Ledger(tmp_path), headers[0][1].author
    assert again.head(author) == LedgerHead(
        150, digest(headers[-1][0].body), total=1500, started_ms=0, time_ms=150_000
    )
    assert list(again.updates_since({author: 3})) == headers[3:]
    assert list(again.headers(author, 10, 12)) == headers[9:12]
    assert again.header(author, 7) == headers[6][0] and again.header(author, 151) is None
    assert again.tickets.get(digest(ticket().body)) == ticket()
    assert again.tickets.get("0" * 64) is None
    again.close()


def test_ledger_header_not_continuing_its_author_is_rejected(ledger):
    headers = chain(3)
    ledger.append(*headers[0])
    assert ledger.append(*altered(headers[1][1], previous="a" * 64)) is Outcome.DIVERGENT
    assert ledger.append(*altered(headers[1][1], total=99)) is Outcome.INCONSISTENT
    assert ledger.append(*headers[1]) is Outcome.ADDED


def test_two_signed_updates_of_one_identity_fork_and_end_the_author(tmp_path):
    ledger, headers = Ledger(tmp_path), chain(3)
    ledger.tickets.store(ticket())
    ledger.append(*headers[0])
    ledger.append(*headers[1])
    other = altered(headers[0][1], tokens=11, total=11)
    assert ledger.append(*other) is Outcome.FORK and ledger.fork_proof(*headers[0]) is None
    fork = ledger.fork_proof(*other)
    assert (fork.one, fork.other) == (headers[0][0], other[0])
    change = ledger.apply_verdicts(VerdictSet.from_proof(fork))
    assert change == VerdictChange({headers[0][1].author: 2}, {}, [])
    assert ledger.vector() == {} and ledger.tokens == 0, "no update from the fork on counts"
    assert ledger.append(*headers[2]) is Outcome.RETRACTED
    other_life = chain(1, life="1" * 16)[0]
    assert ledger.append(*other_life) is Outcome.ADDED, "another incarnation is another author"
    ledger.close()
    ledger = Ledger(tmp_path)
    assert set(ledger.verdicts.forks) == {headers[0][1].author}
    assert ledger.vector() == {other_life[1].author: 1}
    assert ledger.append(*headers[2]) is Outcome.RETRACTED
    assert ledger.header(headers[0][1].author, 2) == headers[1][0], (
        "a machine that must retract it may need it"
    )
    ledger.close()


def test_request_for_headers_that_do_not_exist_queues_none(ledger):
    """A peer asks for millions of headers with a few bytes each."""
    first = chain(1)[0]
    ledger.append(*first)

    def requested(author: str, last: int) -> list[int]:
        request = messages.UpdateRequest(author=author, first=1, last=last, headers=True)
        return list(requested_seqs(ledger, request))

    assert requested(first[1].author, 1 << 52) == [1]
    assert requested(f"{STRANGER.key}.{'0' * 16}", 1 << 52) == []


def test_ledger_append_without_payloads_raises_assertion(ledger):
    part = messages.FragmentUpdate(digest="a" * 64, size=3, sketch="0" * 16)
    with pytest.raises(AssertionError, match="payloads come before"):
        ledger.append(*altered(chain(1)[0][1], fragments=[part]))
    assert ledger.vector() == {}


def test_ledger_rebase_starts_at_snapshot_and_continues(tmp_path):
    ledger, headers = Ledger(tmp_path), chain(8)
    fragments = [ledger.blobs.store(b"one"), ledger.blobs.store(b"two")]
    ledger.rebase([headers[4]], fragments)
    assert ledger.append(*headers[2]) is Outcome.DUPLICATE
    assert ledger.append(*headers[6]) is Outcome.GAP
    assert ledger.append(*headers[5]) is Outcome.ADDED
    assert ledger.tokens == 60
    ledger.close()
    ledger = Ledger(tmp_path)
    assert ledger.base.snapshot() == ([headers[4]], fragments)
    assert ledger.vector() == {headers[0][1].author: 6}
    assert ledger.header(headers[4][1].author, 5) == headers[4][0]
    assert list(ledger.updates_since({headers[4][1].author: 5})) == [headers[5]]
    ledger.close()


def test_ledger_damaged_or_foreign_file_is_refused_by_name(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(
        b"this is not a database, however long it may be" * 100
    )
    with pytest.raises(StateError, match=r"ledger\.sqlite is damaged"):
        Ledger(tmp_path)
    newer = Ledger(tmp_path / "newer")
    newer.close()
    with sqlite3.connect(tmp_path / "newer" / "ledger.sqlite") as db:
        db.execute("PRAGMA user_version=9")
    with pytest.raises(StateError, match="format 9"):
        Ledger(tmp_path / "newer")


def test_ledger_of_format_5_is_read_and_continued(tmp_path):
    headers = chain(4)
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        for header in headers[:2]:
            ledger.append(*header)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        signed, update = headers[1]
        row = (update.author, 2, digest(signed.body), 20, 0, 2000, signed.model_dump_json())
        db.execute("DELETE FROM headers WHERE seq=2")
        values = (*row, digest(repr(row)))
        db.execute("INSERT INTO headers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        db.execute("PRAGMA user_version=5")
        db.commit()
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        for header in headers[2:]:
            assert ledger.append(*header) is Outcome.ADDED
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        assert list(ledger.updates_since({})) == headers


def test_header_takes_about_its_text_on_disk_for_ever(tmp_path):
    """Measure what an update of a model of 14 fragments, as GPT-2 124M has, leaves for ever."""
    previous, filled = GENESIS_DIGEST, []
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        blobs = [ledger.blobs.store(os.urandom(20)) for _ in range(14)]
        for _, update in chain(150):
            parts = [
                messages.FragmentUpdate(digest=name, size=1 << 20, sketch=os.urandom(8).hex())
                for name in blobs
            ]
            filled.append(altered(update, fragments=parts, previous=previous))
            previous = digest(filled[-1][0].body)
        ledger.append_all(filled)
        pruned = ledger.prune(0, {filled[0][1].author: len(filled)})
        assert list(pruned.values()) == [len(filled)]
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    stored = (tmp_path / "ledger.sqlite").stat().st_size / len(filled)
    text = len(filled[-1][0].model_dump_json())
    assert stored < 1.2 * text, "two or three fill a page of 4 kB, and none needs a page of its own"


@pytest.mark.integration
@settings(max_examples=examples(100, 300), deadline=None)
@given(data=st.data())
def test_ledger_flipped_bit_in_file_raises_or_changes_nothing_signed(data):
    with tempfile.TemporaryDirectory() as folder:
        ledger, headers = Ledger(Path(folder)), [*chain(6), *chain(3, identity=STRANGER)]
        for header in headers:
            ledger.append(*header)
        ledger.tickets.store(ticket())
        proof = ledger.fork_proof(*altered(headers[5][1], tokens=11, total=61))
        ledger.apply_verdicts(VerdictSet.from_proof(proof))
        state = (ledger.vector(), ledger.heads_digest, ledger.verdicts)
        updates = list(ledger.updates_since({}))
        ledger.close()
        path = Path(folder) / "ledger.sqlite"
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        try:
            ledger = Ledger(Path(folder))
        except StateError as error:
            assert "ledger.sqlite" in str(error)
            return
        assert (ledger.vector(), ledger.heads_digest, ledger.verdicts) == state
        assert list(ledger.updates_since({})) == updates
        ledger.close()


# ---- validation


def ticket(peer: str = AUTHOR.key, by: Identity = MIRROR, **fields) -> messages.Signed:
    return sign_ticket(by, peer, expires=1.0, **fields)


def valid_update() -> messages.Update:
    return chain(1)[0][1].model_copy(update={"fragments": [PART] * len(RULES.sizes)})


def under(signed_ticket: messages.Signed, **changed) -> messages.Signed:
    """Return a signed header, otherwise valid, that names this ticket."""
    return altered(valid_update(), ticket=digest(signed_ticket.body), **changed)[0]


LARGE_PART = PART.model_copy(update={"size": 1 << 40})


def with_other_tokens(signed: messages.Signed) -> messages.Signed:
    return signed.model_copy(update={"body": signed.body.replace('"tokens":10', '"tokens":11')})


def test_validate_header_accepts_update_with_ticket_that_has_expired_since():
    assert validate_header(under(ticket()), ticket(), RULES) == valid_update()


@pytest.mark.parametrize(
    ("signed", "with_ticket", "reason"),
    [
        (STRANGER.sign("update", valid_update()), ticket(), "is signed by"),
        (AUTHOR.sign("ticket", valid_update()), ticket(), "signature does not match"),
        (
            AUTHOR.sign("update", valid_update()).model_copy(update={"signature": "0" * 128}),
            ticket(),
            "signature",
        ),
        (with_other_tokens(AUTHOR.sign("update", valid_update())), ticket(), "signature"),
        (altered(valid_update(), run=OTHER_RUN)[0], ticket(), "is for run"),
        (altered(valid_update(), tokens=1 << 40)[0], ticket(), "claims"),
        (altered(valid_update(), started_ms=1000)[0], ticket(), "not after its author's start"),
        (altered(valid_update(), tokens=1001)[0], ticket(), "ticket and its time allow 1,000"),
        (altered(valid_update(), ticket="1" * 64)[0], ticket(), "without the ticket"),
        (altered(valid_update(), fragments=[])[0], ticket(), "fragments"),
        (
            altered(valid_update(), fragments=[LARGE_PART] * len(RULES.sizes))[0],
            ticket(),
            "bytes for fragment 0",
        ),
        (AUTHOR.sign("update", valid_update()), None, "without the ticket"),
        (under(ticket(by=STRANGER)), ticket(by=STRANGER), "not a mirror"),
        (under(ticket(STRANGER.key)), ticket(STRANGER.key), "another run or peer"),
        (under(ticket(run=OTHER_RUN)), ticket(run=OTHER_RUN), "another run or peer"),
    ],
)
def test_validate_header_refuses_with_the_reason(signed, with_ticket, reason):
    with pytest.raises(MessageError, match=reason):
        validate_header(signed, with_ticket, RULES)


def test_validate_header_empty_parts_have_exactly_one_encoding():
    first, *rest = valid_update().fragments
    streamed = altered(valid_update(), fragments=[first, *([EMPTY_PART] * len(rest))])[0]
    assert [part.size for part in validate_header(streamed, ticket(), RULES).payload_parts] == [20]
    empty = altered(valid_update(), fragments=[EMPTY_PART] * len(RULES.sizes))[0]
    with pytest.raises(MessageError, match="contains no fragment"):
        validate_header(empty, ticket(), RULES)
    for changed in ({"digest": "a" * 64}, {"sketch": "1" + "0" * 15}):
        parts = [first, *([EMPTY_PART.model_copy(update=changed)] * len(rest))]
        with pytest.raises(MessageError, match="not encoded as an empty part"):
            validate_header(altered(valid_update(), fragments=parts)[0], ticket(), RULES)


def test_decode_payload_refuses_wrong_checksum():
    payload, units = encode(torch.arange(100, dtype=torch.int32))
    part = messages.FragmentUpdate(
        digest=digest(payload), size=len(payload), sketch=compute_sketch(units)
    )
    decode_payload(payload, part, 100)
    with pytest.raises(MessageError, match="checksum"):
        decode_payload(payload, part.model_copy(update={"sketch": "f" * 16}), 100)
    with pytest.raises(MessageError, match="bytes"):
        decode_payload(payload, part.model_copy(update={"size": 5}), 100)


def test_can_continue_from_anchor_within_the_ledger_only(tmp_path):
    ledger = Ledger(tmp_path)
    author, headers = f"{AUTHOR.key}.{'0' * 16}", chain(3)
    ledger.rebase([headers[0]], [ledger.blobs.store(b"a fragment")])
    ledger.append(*headers[1])
    continuable = [seq for seq in (0, 1, 2, 3) if ledger.can_continue_from({author: seq}, {})]
    assert continuable == [1, 2]
    assert ledger.last_updates() == {author: headers[1][1]}
    ledger.close()


def test_rebase_on_full_disk_leaves_ledger_empty_and_usable(tmp_path):
    ledger = Ledger(tmp_path)
    (header,) = chain(1)
    fragment = ledger.blobs.store(b"a fragment")
    db = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    db.execute(
        "CREATE TRIGGER full BEFORE INSERT ON base_fragments BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(sqlite3.Error, match="full"):
        ledger.rebase([header], [fragment])
    assert ledger.vector() == {} and ledger.base.snapshot() is None
    db.execute("DROP TRIGGER full")
    ledger.rebase([header], [fragment])
    assert ledger.base.snapshot() is not None
    ledger.close()


def test_crew_that_shrinks_is_inconsistent_also_after_a_restart(tmp_path):
    members = [messages.CrewShare(key=STRANGER.key, tokens=5)]
    first, second = sign_chain(AUTHOR, 2, crew=members)
    ledger = Ledger(tmp_path)
    assert ledger.append(*first) is Outcome.ADDED
    ledger.close()
    ledger = Ledger(tmp_path)
    assert ledger.head(first[1].author).crew == tuple(members)
    assert ledger.classify(*altered(second[1], crew=[])) is Outcome.INCONSISTENT
    assert ledger.append(*second) is Outcome.ADDED
    ledger.close()
