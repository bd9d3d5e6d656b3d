"""This machine as an author: the name under which it publishes."""

import logging
import threading
from collections.abc import Callable, Container

from barnraise.exchange.ledger.ledger import Ledger, Outcome
from barnraise.protocol.messages import FragmentUpdate, Update
from barnraise.protocol.signing import Identity

log = logging.getLogger("barnraise.exchange")


class LocalAuthor:
    """Sign this machine's updates and append them to the ledger. Thread-safe.

    The author's name is the machine's key and the incarnation of its state directory. A new
    incarnation begins where the old one cannot continue: when peers have updates of it that this
    state directory lost, or when a verdict or a fork ended it.
    """

    def __init__(
        self,
        identity: Identity,
        run: str,
        incarnation: str,
        ledger: Ledger,
        reincarnate: Callable[[], str],
    ) -> None:
        """Continue as `incarnation`.

        Args:
            identity: The machine's key.
            run: The run's id.
            incarnation: The incarnation of the state directory.
            ledger: Where updates are appended.
            reincarnate: Creates a new incarnation, stores it durably and returns it.
        """
        self._identity = identity
        self._run = run
        self._ledger = ledger
        self._reincarnate = reincarnate
        self._lock = threading.Lock()  # no update is signed while the name changes
        self.incarnation = incarnation

    @property
    def name(self) -> str:
        """The author's name: key and incarnation."""
        return f"{self._identity.key}.{self.incarnation}"

    @property
    def last_seq(self) -> int:
        """The sequence number of this incarnation's last update; 0 before the first."""
        return self._ledger.head(self.name).seq

    def append_update(self, parts: list[FragmentUpdate], tokens: int) -> Update:
        """Sign the next update and append it to the ledger.

        Args:
            parts: One for each fragment, in order; their payloads are durable.
            tokens: Tokens that this machine trained on for the update.

        Returns:
            The update's header, durable in the ledger.
        """
        while True:
            with self._lock:
                update = self._try_append(parts, tokens)
                if update is not None:
                    return update
                self._rename("what this machine publishes under its old name no longer counts")

    def _try_append(self, parts: list[FragmentUpdate], tokens: int) -> Update | None:
        """Append the next update; return None when verdicts exclude this incarnation."""
        head = self._ledger.head(self.name)
        update = Update(
            run=self._run,
            peer=self._identity.key,
            incarnation=self.incarnation,
            seq=head.seq + 1,
            previous=head.digest,
            tokens=tokens,
            total=head.total + tokens,
            fragments=parts,
        )
        if self._ledger.verdicts.is_retracted(self.name, update.seq):
            return None
        outcome = self._ledger.append(self._identity.sign("update", update), update)
        assert outcome in (Outcome.ADDED, Outcome.RETRACTED), outcome
        return update if outcome is Outcome.ADDED else None

    def on_own_update(self, update: Update) -> None:
        """Begin a new incarnation when a peer has an update of ours that this ledger lacks."""
        with self._lock:
            if update.author == self.name and update.seq > self._ledger.head(self.name).seq:
                self._rename("peers know updates of ours that this folder lost")

    def on_authors_ended(self, authors: Container[str]) -> None:
        """Begin a new incarnation when the current one is among authors that verdicts ended."""
        with self._lock:
            if self.name in authors:
                self._rename(
                    "a verdict, or a fork, ended what this machine published under its old name"
                )

    def _rename(self, reason: str) -> None:
        """Begin a new incarnation. The caller holds the lock."""
        self.incarnation = self._reincarnate()
        log.warning("%s: it goes on as %s", reason, self.incarnation)
