"""The set of verdicts, forks and opinions, and which updates it retracts. Pure.

A verdict is signed by the run's owner, or by as many of its mirrors as the spec and the mirror list
require. A fork proves itself: two updates with one identity, both signed by their author. Either
cuts an author off after its last good update; a verdict may also name single updates, and exclude a
key or a volunteer with all their authors. Machines' opinions may suspend a volunteer, which
withholds updates in the same way (`suspension`). Merging sets is union, of verdicts, of the
signatures under one verdict, of forks and of opinions; of several forks of one author the earliest
counts, and of the opinions of one machine the newest. So it is a state-based CRDT (Shapiro et al.,
SSS 2011): peers with the same set retract the same updates, in whatever order and however often the
proofs arrived. A verdict leaves the set only when a newer mirror list expels too many of those who
signed it, on every peer that has that list.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from barnraise.errors import MessageError, UnprovenVerdictError
from barnraise.ledger.suspension import (
    Admitted,
    Judgement,
    Kept,
    Statement,
    find_admitted,
    judge,
)
from barnraise.ledger.validation import (
    UpdateRules,
    is_within_ticket,
    open_header,
    open_ticket,
    to_milliseconds,
)
from barnraise.protocol.fork_proof import Fork, Proof
from barnraise.protocol.messages import Signed, Ticket, Update
from barnraise.protocol.opinions import Opinions, SignedOpinions
from barnraise.protocol.signing import digest, open_signed
from barnraise.protocol.table_sizes import FEW
from barnraise.protocol.verdicts import MAX_VERDICT_BYTES, SignedVerdict, Verdict

MAX_FORKS_PER_PEER = 64  # forked incarnations of one peer that are stored
MAX_RULING_BYTES = 64 << 20  # of the texts of all verdicts of a run


@dataclass(frozen=True)
class VerdictSet:
    """Verdicts, forks and opinions, and what follows from them."""

    # The signed verdicts by the digest of their text.
    rulings: Mapping[str, SignedVerdict] = field(default_factory=dict[str, SignedVerdict])
    # Author → the sequence number that it signed twice, and the proof.
    forks: Mapping[str, tuple[int, Fork]] = field(default_factory=dict[str, tuple[int, Fork]])
    # Machine's key → its newest opinions.
    opinions: Mapping[str, SignedOpinions] = field(default_factory=dict[str, SignedOpinions])
    # The texts of `rulings`, by the same digest.
    parsed: Mapping[str, Verdict] = field(default_factory=dict[str, Verdict], compare=False)
    # The texts of `opinions`, by the same key.
    statements: Mapping[str, Statement] = field(default_factory=dict[str, Statement], compare=False)
    # Author → the volunteer that its updates name, as far as authors are known. A ledger shares its
    # own table, which grows.
    volunteers: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    # Those of them whose updates are a newcomer's; a ledger shares its own.
    newcomers: Collection[str] = field(default_factory=set[str], compare=False)

    @classmethod
    def from_proof(cls, proof: Proof) -> "VerdictSet":
        """Return the set of one proof, which has been verified; `verify_proof` verifies it."""
        if isinstance(proof, SignedVerdict):
            name = digest(proof.body)
            return cls({name: proof}, parsed={name: Verdict.model_validate_json(proof.body)})
        if isinstance(proof, SignedOpinions):
            key = proof.opinions.key
            return cls(opinions={key: proof}, statements={key: _parse_opinions(proof)})
        update = Update.model_validate_json(proof.one.body)
        return cls(forks={update.author: (update.seq, proof)})

    def bind(self, volunteers: Mapping[str, str], newcomers: Collection[str] = ()) -> "VerdictSet":
        """Return the same set with what is known: volunteers by author, newcomers' authors."""
        return replace(self, volunteers=volunteers, newcomers=newcomers)

    def __or__(self, other: "VerdictSet") -> "VerdictSet":
        """Return the union. Of two proofs of one thing the same one is kept in either order."""
        rulings = dict(self.rulings)
        for name, ruling in other.rulings.items():
            rulings[name] = _merge_signatures(rulings.get(name, ruling), ruling)
        forks = dict(self.forks)
        for author, fork in other.forks.items():
            forks[author] = min(
                forks.get(author, fork),
                fork,
                key=lambda entry: (entry[0], entry[1].model_dump_json()),
            )
        opinions, statements = dict(self.opinions), dict(self.statements)
        for key in other.opinions:
            if not self._has_opinions(key, other):
                opinions[key] = other.opinions[key]
                statements[key] = other.statements[key]
        parsed = {**self.parsed, **other.parsed}
        known = self if self.volunteers else other
        return VerdictSet(
            rulings, forks, opinions, parsed, statements, known.volunteers, known.newcomers
        )

    def _has_opinions(self, key: str, other: "VerdictSet") -> bool:
        """Return whether a machine's opinions in `other` are not newer than those in this set."""
        if key not in self.opinions:
            return False
        ours, theirs = self.statements[key].time_ms, other.statements[key].time_ms
        if ours != theirs:
            return ours > theirs
        return self.opinions[key].model_dump_json() >= other.opinions[key].model_dump_json()

    def covers(self, other: "VerdictSet") -> bool:
        """Return whether `other` adds nothing to this set."""
        has_opinions = all(self._has_opinions(key, other) for key in other.opinions)
        return has_opinions and self.covers_decisions(other)

    def covers_decisions(self, other: "VerdictSet") -> bool:
        """Return whether `other` adds no verdict, no signature and no fork to this set."""
        return all(
            name in self.rulings
            and ruling.signatures.keys() <= self.rulings[name].signatures.keys()
            for name, ruling in other.rulings.items()
        ) and all(
            author in self.forks and self.forks[author][0] <= seq
            for author, (seq, _) in other.forks.items()
        )

    def has_room_for(self, other: "VerdictSet") -> bool:
        """Return whether the union stays within the limits, which exist because forks are free.

        Those of authors whose updates are here always fit: otherwise machines that have one half
        each would never agree again, and an author's first update is not free. So do the opinions
        of volunteers whom the owner vouches for, or whose updates are here.
        """
        peers = [author.partition(".")[0] for author in self.forks if author not in self.volunteers]
        new_rulings = [ruling for name, ruling in other.rulings.items() if name not in self.rulings]
        ruling_bytes = sum(len(ruling.body) for ruling in (*self.rulings.values(), *new_rulings))
        known = {*self.volunteers.values()}
        strangers = [
            key
            for key, statement in (*self.statements.items(), *other.statements.items())
            if not statement.standing.is_let_in and statement.volunteer not in known
        ]
        has_room_for_opinions = len({*strangers}) <= FEW or not {*strangers} & {
            *other.opinions.keys() - self.opinions.keys()
        }
        return (
            ruling_bytes <= MAX_RULING_BYTES
            and has_room_for_opinions
            and self._has_room_for_forks(other, peers)
        )

    def _has_room_for_forks(self, other: "VerdictSet", peers: list[str]) -> bool:
        return all(
            author in self.forks
            or author in self.volunteers
            or peers.count(author.partition(".")[0]) < MAX_FORKS_PER_PEER
            for author in other.forks
        )

    def with_force(self, rules: UpdateRules) -> "VerdictSet":
        """Return the set without verdicts that lack signatures since mirrors were expelled."""
        rulings = {
            name: ruling
            for name, ruling in self.rulings.items()
            if has_enough_signatures(ruling, self.parsed[name], rules)
        }
        return replace(self, rulings=rulings, parsed={name: self.parsed[name] for name in rulings})

    @cached_property
    def names(self) -> dict[str, Proof]:
        """Return each proof by its name: a digest of what it proves and of who signed it."""
        opinions = {
            digest(f"{item.opinions.signature} {item.ticket.signature}"): item
            for item in self.opinions.values()
        }
        return {**self._decisions, **opinions}

    @cached_property
    def _decisions(self) -> dict[str, Proof]:
        """Return the verdicts and forks by their names."""
        names: dict[str, Proof] = {
            digest("\n".join([name, *sorted(ruling.signatures)])): ruling
            for name, ruling in self.rulings.items()
        }
        for author, (seq, fork) in self.forks.items():
            names[digest(f"{author} {seq}")] = fork
        return names

    # ---- what follows from it

    @cached_property
    def digest(self) -> str | None:
        """Return a digest that is equal for equal sets; None for the empty set."""
        return digest("\n".join(sorted(self.names))) if self.names else None

    @cached_property
    def decisions_digest(self) -> str | None:
        """Return the digest of peers that know no opinions: of the verdicts and forks alone."""
        return digest("\n".join(sorted(self._decisions))) if self._decisions else None

    @cached_property
    def effect_digest(self) -> str | None:
        """Return a digest that is equal for sets that retract the same updates; None for none.

        Opinions are renewed all the time, and most of them change nothing.
        """
        names = sorted(self._decisions)
        if self.suspended:
            names.append(json.dumps(self.suspended, sort_keys=True))
        names += sorted(self._admitted.attested)
        return digest("\n".join(names)) if names else None

    @cached_property
    def doubts(self) -> frozenset[tuple[str, str]]:
        """Return the machine's key and the volunteer of each doubt that is stated."""
        return frozenset(
            (key, volunteer)
            for key, statement in self.statements.items()
            for volunteer in statement.doubted
        )

    @cached_property
    def cleared(self) -> dict[str, int]:
        """Return cleared volunteer → until when doubts of it are void, in ms since 1970."""
        cleared: dict[str, int] = {}
        for verdict in self.parsed.values():
            for volunteer in verdict.cleared:
                until_ms = to_milliseconds(verdict.issued)
                cleared[volunteer] = max(until_ms, cleared.get(volunteer, 0))
        return cleared

    @property
    def _statements_that_count(self) -> list[Statement]:
        """Return the opinions of machines that no verdict excludes."""
        return [
            statement
            for key, statement in sorted(self.statements.items())
            if not self.excludes(key, statement.volunteer)
        ]

    @cached_property
    def _judgement(self) -> Judgement:
        return judge(self._statements_that_count, self.cleared)

    @cached_property
    def _admitted(self) -> Admitted:
        return find_admitted(self._statements_that_count)

    def admits(self, volunteer: str) -> bool:
        """Return whether updates of a volunteer count where its ticket is a newcomer's.

        The owner's verdict that clears a volunteer admits it, too.
        """
        return volunteer in self._admitted or volunteer in self.cleared

    def may_attest(self, volunteer: str) -> bool:
        """Return whether a volunteer's machines can help to admit others."""
        return volunteer in self._admitted.judges

    @property
    def undecided(self) -> list[str]:
        """Return the suspended volunteers that no verdict excludes."""
        return sorted(self.suspended.keys() - self.excluded_volunteers.keys())

    def is_settled(self, volunteer: str, since_ms: int) -> bool:
        """Return whether a verdict has decided on a volunteer that was doubted since some time."""
        is_excluded = volunteer in self.excluded_volunteers
        return is_excluded or since_ms <= self.cleared.get(volunteer, -1)

    @property
    def vouched(self) -> frozenset[str] | None:
        """Return the volunteers that are vouched for; None if the owner vouches for nobody."""
        return self._judgement.vouched

    @property
    def suspended(self) -> Mapping[str, Kept]:
        """Return the suspended volunteers, each with those updates of their authors that stay."""
        return self._judgement.suspended

    @cached_property
    def limits(self) -> dict[str, int]:
        """Return author → its last update that counts, of authors that proofs name one by one."""
        limits = {author: seq - 1 for author, (seq, _) in self.forks.items()}
        for verdict in self.parsed.values():
            for author, last in verdict.after.items():
                limits[author] = min(last, limits.get(author, last))
        return limits

    @cached_property
    def excluded_keys(self) -> dict[str, Kept]:
        """Return the excluded keys, each with those updates of its authors that stay."""
        return _merge_exclusions(verdict.keys for verdict in self.parsed.values())

    @cached_property
    def excluded_volunteers(self) -> dict[str, Kept]:
        """Return the excluded volunteers, each with those updates of their authors that stay."""
        return _merge_exclusions(verdict.volunteers for verdict in self.parsed.values())

    @property
    def cuts_off_authors(self) -> bool:
        """Return whether any author may be cut off."""
        parties = self.excluded_keys or self.excluded_volunteers or self.suspended
        return bool(self.limits or parties or self.newcomers)

    def excludes(self, key: str, volunteer: str) -> bool:
        """Return whether a key, or the volunteer in its ticket, is excluded from the run."""
        return key in self.excluded_keys or volunteer in self.excluded_volunteers

    def limit(
        self, author: str, volunteer: str | None = None, is_newcomer: bool | None = None
    ) -> int | None:
        """Return an author's last update that counts; None if it is not cut off.

        Args:
            author: The author.
            volunteer: The volunteer that its updates name; None if only `volunteers` knows.
            is_newcomer: Whether they are a newcomer's; None if only `newcomers` knows.
        """
        limits: list[int] = []
        if author in self.limits:
            limits.append(self.limits[author])
        kept = self.excluded_keys.get(author.partition(".")[0])
        if kept is not None:
            limits.append(kept.get(author, 0))
        volunteer = volunteer or self.volunteers.get(author, "")
        if is_newcomer is None:
            is_newcomer = author in self.newcomers
        if is_newcomer and not self.admits(volunteer):
            limits.append(0)
        for parties in (self.excluded_volunteers, self.suspended):
            kept = parties.get(volunteer)
            if kept is not None:
                limits.append(kept.get(author, 0))
        return min(limits, default=None)

    def last_valid(self, author: str, seq: int) -> int:
        """Return `seq`, or the author's last update that counts if that is earlier."""
        limit = self.limit(author)
        return seq if limit is None else min(seq, limit)

    @cached_property
    def _named_singles(self) -> dict[str, dict[int, int]]:
        singles: dict[str, dict[int, int]] = {}
        for verdict in self.parsed.values():
            for author, updates in verdict.updates.items():
                named = singles.setdefault(author, {})
                for seq, tokens in updates.items():
                    named[seq] = max(tokens, named.get(seq, 0))
        return {author: dict(sorted(named.items())) for author, named in singles.items()}

    def singles_of(self, author: str) -> dict[int, int]:
        """Return sequence number → tokens of an author's single retracted updates.

        Its later updates count.
        """
        named = self._named_singles.get(author)
        if not named:
            return {}
        limit = self.limit(author)
        return {seq: tokens for seq, tokens in named.items() if limit is None or seq <= limit}

    @property
    def singles(self) -> dict[str, dict[int, int]]:
        """Return author → sequence number → tokens of single retracted updates."""
        singles = {author: self.singles_of(author) for author in self._named_singles}
        return {author: updates for author, updates in singles.items() if updates}

    def is_retracted(self, author: str, seq: int) -> bool:
        """Return whether this update does not count."""
        return seq > self.last_valid(author, seq) or seq in self.singles_of(author)

    def clamp(self, vector: Mapping[str, int]) -> dict[str, int]:
        """Return the part of a version vector that is not cut off."""
        clamped = {author: self.last_valid(author, seq) for author, seq in vector.items()}
        return {author: seq for author, seq in clamped.items() if seq}

    def retracted_within(self, vector: Mapping[str, int]) -> dict[str, dict[int, int]]:
        """Return those of `singles` that a version vector covers."""
        within = {
            author: {seq: tokens for seq, tokens in updates.items() if seq <= vector.get(author, 0)}
            for author, updates in self.singles.items()
        }
        return {author: updates for author, updates in within.items() if updates}


def _parse_opinions(proof: SignedOpinions) -> Statement:
    opinions = Opinions.model_validate_json(proof.opinions.body)
    ticket = Ticket.model_validate_json(proof.ticket.body)
    return Statement(
        volunteer=ticket.volunteer,
        standing=ticket.standing,
        time_ms=opinions.time_ms,
        doubted=opinions.doubted,
        agreeing=frozenset(opinions.agreeing),
        attested=frozenset(opinions.attested),
    )


def _merge_signatures(one: SignedVerdict, other: SignedVerdict) -> SignedVerdict:
    """Return one text with the signatures of both; a key's smaller one, if it signed twice."""
    if one.signatures == other.signatures:
        return one
    signatures = {**one.signatures}
    for key, signature in other.signatures.items():
        signatures[key] = min(signature, signatures.get(key, signature))
    return one.model_copy(update={"signatures": dict(sorted(signatures.items()))})


def _merge_exclusions(exclusions: Iterable[Mapping[str, Kept]]) -> dict[str, Kept]:
    """Merge what stays of each excluded party: only what every verdict leaves."""
    merged: dict[str, Kept] = {}
    for excluded in exclusions:
        for party, kept in excluded.items():
            before = merged.get(party, kept)
            merged[party] = {
                author: min(last, before[author])
                for author, last in kept.items()
                if author in before
            }
    return merged


# ---- proofs


def verify_proof(proof: Proof, rules: UpdateRules) -> VerdictSet:
    """Verify a proof and return the set that it stands for.

    Raises:
        UnprovenVerdictError: If a verdict lacks signatures by the mirror list known here.
        MessageError: If it is not valid, with the reason.
    """
    if isinstance(proof, SignedVerdict):
        _verify_verdict(proof, rules)
    elif isinstance(proof, SignedOpinions):
        _verify_opinions(proof, rules)
    else:
        _verify_fork(proof, rules)
    return VerdictSet.from_proof(proof)


def has_enough_signatures(ruling: SignedVerdict, verdict: Verdict, rules: UpdateRules) -> bool:
    """Return whether a verdict, whose signatures are valid, binds all machines."""
    if rules.owner in ruling.signatures:
        return True
    return not rules.mirrors.missing_signatures(ruling.signatures, verdict.mirror_list_version)


def _verify_verdict(ruling: SignedVerdict, rules: UpdateRules) -> None:
    if len(ruling.body.encode()) > MAX_VERDICT_BYTES:
        raise MessageError(f"a verdict of more than {MAX_VERDICT_BYTES} bytes is refused")
    verdict = None
    for key, signature in ruling.signatures.items():
        signed = Signed(key=key, body=ruling.body, signature=signature)
        verdict = open_signed(signed, "verdict", Verdict)
    assert verdict is not None, "a message's bounds ask for a signature"
    if verdict.run != rules.run:
        raise MessageError(f"a verdict is for run {verdict.run}, not {rules.run}")
    strangers = ruling.signatures.keys() - rules.mirrors.keys - {rules.owner}
    is_by_owner = rules.owner in ruling.signatures
    if verdict.mirror_list_version > rules.mirrors.list_version and (strangers or not is_by_owner):
        raise UnprovenVerdictError(
            f"a verdict names the mirror list {verdict.mirror_list_version}, and this machine has "
            f"{rules.mirrors.list_version or 'none'}"
        )
    if strangers:
        raise MessageError(
            f"a verdict is signed by {min(strangers)[:8]}, neither the run's owner nor one of its "
            "mirrors"
        )
    if not has_enough_signatures(ruling, verdict, rules):
        missing = rules.mirrors.missing_signatures(ruling.signatures, verdict.mirror_list_version)
        raise UnprovenVerdictError(
            f"a verdict needs its run's owner, or {missing} more of the mirrors that are not "
            "expelled"
        )


def _verify_opinions(proof: SignedOpinions, rules: UpdateRules) -> None:
    key = proof.opinions.key
    opinions = open_signed(proof.opinions, "opinions", Opinions)
    if (opinions.run, opinions.peer) != (rules.run, key):
        raise MessageError(f"the opinions of {key[:8]} are of another run or machine")
    ticket = open_ticket(proof.ticket, key, rules)
    if not is_within_ticket(opinions.time_ms, ticket):
        raise MessageError(f"the opinions of {key[:8]} are of a time without a valid ticket")
    if any(doubt.since_ms > opinions.time_ms for doubt in opinions.doubted.values()):
        raise MessageError(f"{key[:8]} doubts somebody from a time on that has not come")


def _verify_fork(fork: Fork, rules: UpdateRules) -> None:
    one = open_header(fork.one, rules)
    other = open_header(fork.other, rules)
    open_ticket(fork.ticket, one.peer, rules)
    if (one.author, one.seq) != (other.author, other.seq) or fork.one.body == fork.other.body:
        raise MessageError("the proof of a fork is not two different updates with one identity")
