"""This machine as an author: the name under which it publishes."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from barnraise.errors import ExcludedError
from barnraise.ledger.ledger import Ledger, LedgerHead, Outcome
from barnraise.ledger.validation import (
    allowed_tokens,
    has_possible_history,
    run_created_ms,
    to_milliseconds,
)
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.planning.update_header import max_crew_members
from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import (
    CrewShare,
    FragmentUpdate,
    Signed,
    Ticket,
    Update,
)
from barnraise.protocol.opinions import Doubt, Opinions, SignedOpinions
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import RunSpec

log = logging.getLogger("barnraise.exchange")

MAX_CLOCK_STEP_MS = 60_000  # a clock that is set back by more ends an incarnation


def _create_incarnation() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True)
class AuthorConfig:
    """Who publishes in which run."""

    spec: RunSpec
    run: str
    identity: Identity  # the machine's key
    incarnation: str  # the incarnation of its state directory
    ticket: Signed  # the machine's ticket
    clock: Callable[[], float] = time.time  # returns seconds since 1970, by the coordinators' clock
    # Creates a new incarnation of the state directory and stores it durably; called when a peer
    # proves that updates of ours were lost here, or a verdict ended the old one.
    reincarnate: Callable[[], str] = _create_incarnation


class LocalAuthor:
    """Sign this machine's updates and append them to the ledger. Thread-safe.

    The author's name is the machine's key and the incarnation of its state directory. A new
    incarnation begins where the old one cannot continue: when peers have updates of it that this
    state directory lost, or when a verdict or a fork ended it.

    Updates state no more tokens than the ticket allows for their time. Tokens beyond that are
    stated by the next updates, as far as the ticket allows.
    """

    def __init__(self, config: AuthorConfig, ledger: Ledger) -> None:
        """Continue as the incarnation of the state directory. `key` is the machine's."""
        self._config = config
        self.key = config.identity.key
        self._ledger = ledger
        self._lock = threading.Lock()  # no update is signed while the name changes
        self._trains_since_ms = self._now_ms()  # what was published before is not trained since
        self._warned = False
        self._logged_probation = ""
        self.incarnation = config.incarnation
        self._signed: dict[str, int] = {}  # author → the last update that this process signed
        self._crew_flops: Mapping[str, int] = {}
        self.unstated_tokens = 0  # trained and published, but beyond what the ticket allowed
        self.set_ticket(config.ticket)

    def should_keep_ticket(self, newer: Signed) -> bool:
        """Return whether to stay with the present ticket, because the newer one is of the future.

        Its mirror's clock is ahead. An update states no time before its ticket's issue, so all
        peers would hold this machine's updates back until then.
        """
        now = self._config.clock()
        issued = Ticket.model_validate_json(newer.body).issued
        return issued > now + MAX_CLOCK_STEP_MS / 1000 and now < self._ticket.expires

    def set_ticket(self, ticket: Signed) -> None:
        """Publish under this ticket from now on.

        All updates of an incarnation name one volunteer: if the ticket names another, a new one
        begins.
        """
        self._ledger.tickets.store(ticket)
        with self._lock:
            self._signed_ticket = ticket
            self._ticket = Ticket.model_validate_json(ticket.body)
            self._ticket_digest = digest(ticket.body)
            self._warned = False
            volunteer = self._ledger.volunteers.get(self.name, self._ticket.volunteer)
            was_newcomer = self.name in self._ledger.newcomers
            if self._ticket.volunteer != volunteer:
                self._rename("the coordinators know this machine's owner by another pseudonym")
            elif self.name in self._ledger.volunteers and was_newcomer != self._is_newcomer:
                self._rename("the coordinators know this machine's owner by another standing")

    def set_crew(self, flops: Mapping[str, int]) -> None:
        """State, in updates from now on, what others computed of them.

        Args:
            flops: of a step, by the keys of all machines of the crew, this one's among them.
        """
        with self._lock:
            self._crew_flops = flops

    @property
    def name(self) -> str:
        """The author's name: key and incarnation."""
        return f"{self.key}.{self.incarnation}"

    @property
    def last_seq(self) -> int:
        """The sequence number of this incarnation's last update; 0 before the first."""
        return self._ledger.head(self.name).seq

    def append_update(self, parts: list[FragmentUpdate], tokens: int) -> Update | None:
        """Sign the next update and append it to the ledger.

        Args:
            parts: One for each fragment, in order; their payloads are durable.
            tokens: Tokens that this machine trained on for the update.

        Returns:
            The update's header, durable in the ledger; None where it would not count because this
            machine is suspended or a newcomer. Its payloads are then to be deleted once they are
            unpinned.

        Raises:
            ExcludedError: A verdict excludes this machine from the run.
        """
        with self._lock:
            self._rename_if_clock_was_ahead()
            while True:
                if self.exclusion is not None:
                    raise ExcludedError(self.exclusion)
                if self.suspension or self.probation:
                    digests = [part.digest for part in parts if part.size]
                    self._ledger.retention.expect_files(digests)
                    return None
                update = self._try_append(parts, tokens)
                if update is not None:
                    return update
                if not self.suspension:  # it may have come between the two looks
                    self._rename("what this machine publishes under its old name no longer counts")

    def _try_append(self, parts: list[FragmentUpdate], tokens: int) -> Update | None:
        """Append the next update; return None when this incarnation cannot continue.

        Verdicts may have ended it, or a new ticket allows fewer tokens than it has stated.
        """
        head = self._ledger.head(self.name)
        started_ms = head.started_ms if head.seq else self._next_start_ms()
        previous_ms = max(started_ms, head.time_ms)
        issued_ms = to_milliseconds(self._ticket.issued)
        time_ms = max(self._now_ms(), previous_ms + 1, issued_ms)
        trained = tokens + self.unstated_tokens
        allowed = allowed_tokens(self._ticket, previous_ms, time_ms)
        stated = min(trained, allowed, self._config.spec.max_tokens_per_update)
        update = Update(
            run=self._config.run,
            peer=self.key,
            incarnation=self.incarnation,
            seq=head.seq + 1,
            previous=head.digest,
            tokens=stated,
            total=head.total + stated,
            started_ms=started_ms,
            time_ms=time_ms,
            ticket=self._ticket_digest,
            volunteer=self._ticket.volunteer,
            newcomer=self._is_newcomer,
            crew=self._share_among_crew(head.crew, stated, max_crew_members(len(parts))),
            fragments=parts,
        )
        is_retracted = self._ledger.verdicts.is_retracted(self.name, update.seq)
        if is_retracted or not has_possible_history(update, self._ticket):
            return None
        outcome = self._ledger.append(self._config.identity.sign("update", update), update)
        assert outcome in (Outcome.ADDED, Outcome.RETRACTED), outcome
        if outcome is not Outcome.ADDED:
            return None
        self._signed[update.author] = update.seq
        self._set_unstated(trained - stated)
        return update

    def has_signed(self, update: Update) -> bool:
        """Return whether this process has signed an update of this key."""
        with self._lock:
            return update.seq <= self._signed.get(update.author, 0)

    def sign_opinions(
        self, doubted: dict[str, Doubt], agreeing: list[str], attested: list[str]
    ) -> SignedOpinions:
        """Sign what this machine states of other volunteers, in place of what it stated before."""
        with self._lock:
            stated = self._ledger.verdicts.statements.get(self.key)
            opinions = Opinions(
                run=self._config.run,
                peer=self.key,
                time_ms=max(self._now_ms(), stated.time_ms + 1 if stated else 0),
                doubted=doubted,
                agreeing=agreeing,
                attested=attested,
            )
            signed = self._config.identity.sign("opinions", opinions)
            return SignedOpinions(opinions=signed, ticket=self._signed_ticket)

    @property
    def suspension(self) -> str | None:
        """Why this machine's updates are withheld, as a sentence; None if they are not."""
        if self._ticket.volunteer not in self._ledger.verdicts.suspended:
            return None
        return (
            "machines that are vouched for find that this machine's updates do not agree with "
            "theirs: it waits for the run's owner, who can clear or exclude its volunteer"
        )

    @property
    def probation(self) -> str | None:
        """Why this newcomer's updates do not count yet, as a sentence; None if they do."""
        if not self._is_newcomer or self._ledger.verdicts.admits(self._ticket.volunteer):
            return None
        return (
            "what this machine trains counts once the machine of the run's owner, or those of two "
            "people whose updates count, have found for some rounds that its updates agree with "
            "theirs"
        )

    def log_probation(self) -> None:
        """Log when it begins, and when it ends, that this newcomer's updates do not count yet."""
        reason = self.probation or ""
        if reason != self._logged_probation:
            log.info("%s", reason or "what this machine trains counts from now on")
            self._logged_probation = reason

    @property
    def _is_newcomer(self) -> bool:
        return self._ticket.standing is Standing.NEWCOMER

    def _set_unstated(self, tokens: int) -> None:
        """Remember what the ticket did not allow to be stated, and log it once per ticket."""
        self.unstated_tokens = tokens
        if tokens > self._ticket.max_tokens_per_second and not self._warned:
            self._warned = True
            log.warning(
                "this machine trains faster than the %s tokens per second that its ticket allows: "
                "its updates count with fewer tokens until the coordinator issues another ticket",
                f"{self._ticket.max_tokens_per_second:,}",
            )

    def on_own_update(self, update: Update) -> None:
        """Begin a new incarnation when a peer has an update of ours that this ledger lacks."""
        with self._lock:
            self._trains_since_ms = max(self._trains_since_ms, min(update.time_ms, self._now_ms()))
            if update.author == self.name and update.seq > self._ledger.head(self.name).seq:
                self._rename("peers know updates of ours that this folder lost")

    @property
    def exclusion(self) -> str | None:
        """Why this machine may not publish any longer, as a sentence; None if it may."""
        if not self._ledger.verdicts.excludes(self.key, self._ticket.volunteer):
            return None
        return "a verdict of the run's owner or its mirrors excludes this machine from the run"

    def on_verdicts(self, verdicts: VerdictSet) -> None:
        """Begin a new incarnation when new verdicts end the current one."""
        with self._lock:
            if self.name in verdicts.limits and self.exclusion is None:
                self._rename(
                    "a verdict, or a fork, ended what this machine published under its old name"
                )

    # ---- the caller of these holds the lock

    def _share_among_crew(
        self, before: Sequence[CrewShare], tokens: int, most: int
    ) -> list[CrewShare]:
        """Return the tokens of at most so many members after an update of so many tokens.

        The lead has what remains of divisions, and the part of a member for which the header has no
        room, for instance because others trained with this author before.
        """
        shares = {share.key: share.tokens for share in before}
        total_flops = max(1, sum(self._crew_flops.values()))
        for key, flops in self._crew_flops.items():
            if key != self.key and (key in shares or len(shares) < most):
                shares[key] = shares.get(key, 0) + tokens * flops // total_flops
        return [CrewShare(key=key, tokens=shares[key]) for key in sorted(shares)]

    def _now_ms(self) -> int:
        return to_milliseconds(self._config.clock())

    def _next_start_ms(self) -> int:
        """Return when a new incarnation started: where the last one ended, or this process began.

        The incarnations of one key must not overlap: time counts once.
        """
        last_ms = self._ledger.last_time_ms(self.key)
        if last_ms > self._now_ms():  # signed by a clock that was ahead
            last_ms = 0
        return max(self._trains_since_ms, last_ms, run_created_ms(self._config.run))

    def _rename_if_clock_was_ahead(self) -> None:
        """Begin a new incarnation when the last update is of a time that is far ahead.

        Peers would hold back what follows it until then.
        """
        head: LedgerHead = self._ledger.head(self.name)
        now_ms = self._now_ms()
        if head.time_ms > now_ms + MAX_CLOCK_STEP_MS:
            self._trains_since_ms = min(self._trains_since_ms, now_ms)
            self._rename(
                f"this machine's clock was {(head.time_ms - now_ms) / 1000:.0f} seconds ahead"
            )

    def _rename(self, reason: str) -> None:
        """Begin a new incarnation."""
        self.incarnation = self._config.reincarnate()
        log.warning("%s: it goes on as %s", reason, self.incarnation)
