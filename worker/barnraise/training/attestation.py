"""Attestations that this machine has applied other authors' updates.

They earn those authors credit.
"""

import time
from collections.abc import Mapping

from barnraise.ledger.ledger import Ledger
from barnraise.protocol.coordinator_messages import (
    Attestation,
    AttestationStatement,
    SignedHeader,
    SignedStatement,
)
from barnraise.protocol.messages import Update
from barnraise.protocol.signing import Identity, digest

INTERVAL_SECONDS = 60.0  # between two batches: the header of a large model has some kilobytes
BATCH_AUTHORS = 2  # authors of one batch, those with the most new tokens first


class Attester:
    """Attests, now and then, which updates of other authors are in this machine's anchor."""

    def __init__(self, identity: Identity, run: str, ledger: Ledger) -> None:
        self._identity = identity
        self._run = run
        self._ledger = ledger
        self._attested_tokens: dict[str, int] = {}  # author → tokens
        self._next_time = 0.0  # monotonic seconds

    def attest_new_updates(
        self, heads: Mapping[str, Update], at_once: bool = False
    ) -> tuple[Attestation, ...]:
        """Sign attestations for authors with new updates, when they are due.

        An attestation covers all earlier updates of its author, including those that a verdict
        retracted: the coordinator, which counts the tokens, knows the verdict.
        """
        now = time.monotonic()
        new_tokens = {
            author: head.total - self._attested_tokens.get(author, 0)
            for author, head in heads.items()
            if head.peer != self._identity.key
        }
        authors = [author for author, tokens in new_tokens.items() if tokens > 0]
        if not authors or (now < self._next_time and not at_once):
            return ()
        self._next_time = now + INTERVAL_SECONDS
        authors.sort(key=lambda author: -new_tokens[author])
        return tuple(self._attest(heads[author]) for author in authors[:BATCH_AUTHORS])

    def _attest(self, head: Update) -> Attestation:
        header = self._ledger.header(head.author, head.seq)
        assert header is not None, "every update in the anchor is in the ledger"
        self._attested_tokens[head.author] = head.total
        statement = AttestationStatement(
            run=self._run, author=head.author, head=digest(header.body)
        )
        signed = self._identity.sign("attestation", statement)
        return Attestation(
            head=SignedHeader(**header.model_dump()),
            statement=SignedStatement(**signed.model_dump()),
        )
