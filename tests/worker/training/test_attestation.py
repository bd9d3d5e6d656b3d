"""Attestations of other authors' updates."""

from types import SimpleNamespace

import pytest
from helpers.fake_coordinator import MACHINE, RUN

from barnraise.errors import MessageError
from barnraise.protocol import coordinator_messages
from barnraise.protocol.coordinator_messages import (
    AttestationStatement,
    SignedHeader,
    SignedStatement,
)
from barnraise.protocol.messages import Signed, Update
from barnraise.protocol.signing import Identity, check_attestation, digest
from barnraise.training.attestation import Attester


def test_attester_covers_new_updates_of_others_in_batches(tmp_path, monkeypatch):
    ours, authors = Identity(b"w" * 32), [Identity(bytes([n]) * 32) for n in (1, 2, 3)]
    known: dict[tuple[str, int], Signed] = {}

    def head(author: Identity, seq: int) -> Update:
        update = Update(
            run=RUN,
            peer=author.key,
            incarnation="a" * 16,
            seq=seq,
            previous="0" * 64,
            tokens=10,
            total=seq * 10 * (1 + authors.index(author) if author in authors else 1),
            fragments=[],
        )
        known[update.author, seq] = author.sign("update", update)
        return update

    attester = Attester(ours, RUN, SimpleNamespace(header=lambda author, seq: known[author, seq]))
    heads = {
        each.author: each for each in (*(head(author, 2) for author in authors), head(ours, 5))
    }
    first = attester.attest_new_updates(heads)
    assert [check_attestation(each, RUN, ours.key).peer for each in first] == [
        authors[2].key,
        authors[1].key,
    ]
    assert attester.attest_new_updates(heads) == (), "a minute has to pass"
    second = attester.attest_new_updates(heads, at_once=True)
    assert [check_attestation(each, RUN).peer for each in second] == [authors[0].key]
    assert attester.attest_new_updates(heads, at_once=True) == (), "nothing is new"
    heads[heads_of := next(iter(heads))] = head(authors[0], 3)
    assert [
        check_attestation(each, RUN).seq
        for each in attester.attest_new_updates(heads, at_once=True)
    ] == [3], heads_of


@pytest.mark.parametrize(
    "spoilt, said",
    [
        ({"run": MACHINE}, "is not all of run"),
        ({"witness": "b"}, "not by"),
        ({"head": "0" * 64}, "is not the update it comes with"),
        ({"author": "b" * 64 + "." + "a" * 16}, "is not the update it comes with"),
        ({"signer": b"x"}, "is signed by"),
        ({"body": " "}, "signature does not match"),
    ],
)
def test_attestation_that_proves_something_else_is_refused(spoilt, said):
    author, witness = Identity(b"a" * 32), Identity(b"w" * 32)
    update = Update(
        run=RUN,
        peer=author.key,
        incarnation="a" * 16,
        seq=1,
        previous="0" * 64,
        tokens=1,
        total=1,
        fragments=[],
    )
    signed = (Identity(spoilt["signer"] * 32) if "signer" in spoilt else author).sign(
        "update", update
    )
    word = AttestationStatement(
        run=spoilt.get("run", RUN),
        author=spoilt.get("author", update.author),
        head=spoilt.get("head", digest(signed.body)),
    )
    by = witness.sign("attestation", word)
    head = signed.model_dump() | {"body": signed.body + spoilt.get("body", "")}
    told = coordinator_messages.Attestation(
        head=SignedHeader(**head), statement=SignedStatement(**by.model_dump())
    )
    with pytest.raises(MessageError, match=said):
        check_attestation(told, RUN, (Identity(b"b" * 32) if "witness" in spoilt else witness).key)
