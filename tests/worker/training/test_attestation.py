"""Attestations of other authors' updates."""

from types import SimpleNamespace

import pytest
from helpers.updates.headers import build_update
from helpers.worker.fake_coordinator import MACHINE, RUN

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
    ours = Identity(b"w" * 32)
    authors = [Identity(bytes([number]) * 32) for number in (1, 2, 3)]
    headers: dict[tuple[str, int], Signed] = {}

    def add_update(author: Identity, seq: int) -> Update:
        tokens = 10 * (1 + authors.index(author) if author in authors else 1)
        update = build_update(author.key, seq, run=RUN, tokens=tokens)
        headers[update.author, seq] = author.sign("update", update)
        return update

    attester = Attester(ours, RUN, SimpleNamespace(header=lambda author, seq: headers[author, seq]))
    updates = [*(add_update(author, 2) for author in authors), add_update(ours, 5)]
    heads = {update.author: update for update in updates}
    first = attester.attest_new_updates(heads)
    attested = [check_attestation(attestation, RUN, ours.key).peer for attestation in first]
    assert attested == [authors[2].key, authors[1].key]
    assert attester.attest_new_updates(heads) == (), "the next batch is due after a minute"
    second = attester.attest_new_updates(heads, at_once=True)
    attested = [check_attestation(attestation, RUN).peer for attestation in second]
    assert attested == [authors[0].key]
    assert attester.attest_new_updates(heads, at_once=True) == (), "nothing is new"
    newer = add_update(authors[0], 3)
    heads[newer.author] = newer
    third = attester.attest_new_updates(heads, at_once=True)
    assert [check_attestation(attestation, RUN).seq for attestation in third] == [3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": MACHINE}, "is not all of run"),
        ({"witness": b"b"}, "not by"),
        ({"head": "0" * 64}, "is not the update it comes with"),
        ({"author": "b" * 64 + "." + "a" * 16}, "is not the update it comes with"),
        ({"signer": b"x"}, "is signed by"),
        ({"body": " "}, "signature does not match"),
    ],
)
def test_attestation_that_proves_something_else_is_refused(changes, reason):
    author, witness = Identity(b"a" * 32), Identity(b"w" * 32)
    update = build_update(author.key, run=RUN, incarnation="a" * 16)
    signer = Identity(changes["signer"] * 32) if "signer" in changes else author
    header = signer.sign("update", update)
    statement = AttestationStatement(
        run=changes.get("run", RUN),
        author=changes.get("author", update.author),
        head=changes.get("head", digest(header.body)),
    )
    signed_statement = witness.sign("attestation", statement)
    header_fields = header.model_dump() | {"body": header.body + changes.get("body", "")}
    attestation = coordinator_messages.Attestation(
        head=SignedHeader(**header_fields),
        statement=SignedStatement(**signed_statement.model_dump()),
    )
    expected_witness = Identity(changes.get("witness", b"w") * 32)
    with pytest.raises(MessageError, match=reason):
        check_attestation(attestation, RUN, expected_witness.key)
