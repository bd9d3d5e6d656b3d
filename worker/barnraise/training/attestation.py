"""A machine's signed word for others' updates that it has applied, for their credit. Anybody may check it later."""

import time
from collections.abc import Mapping

from barnraise.exchange.ledger.ledger import Ledger
from barnraise.protocol.coordinator_messages import (
    Attestation,
    AttestationStatement,
    SignedHeader,
    SignedStatement,
)
from barnraise.protocol.messages import Update
from barnraise.protocol.signing import Identity, digest

EVERY = 60.0  # seconds; a header of a large model is some kilobytes
AT_ONCE = 2  # authors, those of whom the most is new first


class Attester:
    def __init__(self, identity: Identity, run: str, ledger: Ledger):
        self._identity, self._run, self._ledger = identity, run, ledger
        self._told: dict[str, int] = {}  # author → tokens
        self._next = 0.0

    def attest_new_updates(
        self, heads: Mapping[str, Update], at_once: bool = False
    ) -> tuple[Attestation, ...]:
        """For some authors of what is in an anchor with these `heads`, where it is time to, or at once. What came after
        a verdict's single updates speaks for those as well: whoever counts tokens knows of the verdict."""
        now = time.monotonic()
        fresh = {
            author: head.total - self._told.get(author, 0)
            for author, head in heads.items()
            if head.peer != self._identity.key and head.total > self._told.get(author, 0)
        }
        if not fresh or (now < self._next and not at_once):
            return ()
        self._next = now + EVERY
        return tuple(
            self._testimony(heads[each])
            for each in sorted(fresh, key=lambda a: -fresh[a])[:AT_ONCE]
        )

    def _testimony(self, head: Update) -> Attestation:
        signed = self._ledger.header(head.author, head.seq)
        assert signed is not None, "an anchor holds what its ledger has"
        self._told[head.author] = head.total
        said = AttestationStatement(run=self._run, author=head.author, head=digest(signed.body))
        word = self._identity.sign("attestation", said)
        return Attestation(
            head=SignedHeader(**signed.model_dump()), statement=SignedStatement(**word.model_dump())
        )
