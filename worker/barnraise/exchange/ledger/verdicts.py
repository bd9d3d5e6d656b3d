"""The set of verdicts and forks, and which updates it retracts. Pure.

A verdict is signed by the run's owner, or by as many of its mirrors as the spec requires. A fork
proves itself: two updates with one identity, both signed by their author. Either cuts an author off
after its last good update; a verdict may also name single updates. The set only grows, and merging
is union; of several forks of one author the earliest counts. So it is a state-based CRDT (Shapiro
et al., SSS 2011): peers with the same set retract the same updates, in whatever order and however
often the proofs arrived.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from barnraise.errors import MessageError
from barnraise.exchange.ledger.validation import UpdateRules, open_header, open_ticket
from barnraise.protocol.messages import Signed, Update
from barnraise.protocol.signing import digest, open_signed
from barnraise.protocol.types import Message
from barnraise.protocol.verdicts import MAX_VERDICT_BYTES, MAX_VERDICTS, SignedVerdict, Verdict

MAX_FORKS_PER_PEER = 64  # forked incarnations of one peer that are stored


class Fork(Message):
    """Two different updates that one author signed with one sequence number.

    `ticket` is any ticket of the author: only keys that took part in the run can fork.
    """

    type: Literal["fork"] = "fork"
    one: Signed
    other: Signed
    ticket: Signed


Proof = SignedVerdict | Fork


@dataclass(frozen=True)
class VerdictSet:
    """Verdicts and forks, and what follows from them.

    Attributes:
        rulings: The signed verdicts by the digest of their text.
        forks: Author → the sequence number that it signed twice, and the proof.
    """

    rulings: Mapping[str, SignedVerdict] = field(default_factory=dict[str, SignedVerdict])
    forks: Mapping[str, tuple[int, Fork]] = field(default_factory=dict[str, tuple[int, Fork]])

    @classmethod
    def from_proof(cls, proof: Proof) -> "VerdictSet":
        """Return the set of one proof, which has been verified; `verify_proof` verifies it."""
        if isinstance(proof, SignedVerdict):
            return cls({digest(proof.body): proof})
        update = Update.model_validate_json(proof.one.body)
        return cls(forks={update.author: (update.seq, proof)})

    def __or__(self, other: "VerdictSet") -> "VerdictSet":
        """Return the union. Of two proofs of one thing the same one is kept in either order."""
        rulings = dict(self.rulings)
        for name, ruling in other.rulings.items():
            rulings[name] = min(rulings.get(name, ruling), ruling, key=_text)
        forks = dict(self.forks)
        for author, fork in other.forks.items():
            forks[author] = min(
                forks.get(author, fork), fork, key=lambda entry: (entry[0], _text(entry[1]))
            )
        return VerdictSet(rulings, forks)

    def covers(self, other: "VerdictSet") -> bool:
        """Return whether `other` adds nothing to this set."""
        return other.rulings.keys() <= self.rulings.keys() and all(
            author in self.forks and self.forks[author][0] <= seq
            for author, (seq, _) in other.forks.items()
        )

    def has_room_for(self, other: "VerdictSet") -> bool:
        """Return whether the union stays within the limits, which exist because forks are free."""
        peers = [author.partition(".")[0] for author in self.forks]
        return len(self.rulings.keys() | other.rulings.keys()) <= MAX_VERDICTS and all(
            author in self.forks or peers.count(author.partition(".")[0]) < MAX_FORKS_PER_PEER
            for author in other.forks
        )

    def proofs(self) -> Iterator[Proof]:
        """Yield all verdicts, then all forks."""
        yield from self.rulings.values()
        for _, fork in self.forks.values():
            yield fork

    # ---- what follows from it

    @cached_property
    def digest(self) -> str | None:
        """Return a digest that is equal for equal sets; None for the empty set."""
        names = [*self.rulings, *(f"{author} {seq}" for author, (seq, _) in self.forks.items())]
        return digest("\n".join(sorted(names))) if names else None

    @cached_property
    def limits(self) -> dict[str, int]:
        """Return author → sequence number of its last update that counts, if it is cut off."""
        limits = {author: seq - 1 for author, (seq, _) in self.forks.items()}
        for verdict in self._verdicts:
            for author, last in verdict.after.items():
                limits[author] = min(last, limits.get(author, last))
        return limits

    @cached_property
    def singles(self) -> dict[str, dict[int, int]]:
        """Return author → sequence number → tokens of single retracted updates.

        Later updates of their authors count.
        """
        singles: dict[str, dict[int, int]] = {}
        for verdict in self._verdicts:
            for author, updates in verdict.updates.items():
                retracted = singles.setdefault(author, {})
                limit = self.limits.get(author)
                for seq, tokens in updates.items():
                    if limit is None or seq <= limit:
                        retracted[seq] = max(tokens, retracted.get(seq, 0))
        return {
            author: dict(sorted(updates.items())) for author, updates in singles.items() if updates
        }

    @cached_property
    def _verdicts(self) -> list[Verdict]:
        return [Verdict.model_validate_json(ruling.body) for ruling in self.rulings.values()]

    def is_retracted(self, author: str, seq: int) -> bool:
        """Return whether this update does not count."""
        return seq > self.limits.get(author, seq) or seq in self.singles.get(author, ())

    def clamp(self, vector: Mapping[str, int]) -> dict[str, int]:
        """Return the part of a version vector that is not cut off."""
        clamped = {author: min(seq, self.limits.get(author, seq)) for author, seq in vector.items()}
        return {author: seq for author, seq in clamped.items() if seq}

    def retracted_within(self, vector: Mapping[str, int]) -> dict[str, dict[int, int]]:
        """Return those of `singles` that a version vector covers."""
        within = {
            author: {seq: tokens for seq, tokens in updates.items() if seq <= vector.get(author, 0)}
            for author, updates in self.singles.items()
        }
        return {author: updates for author, updates in within.items() if updates}


def verify_proof(proof: Proof, rules: UpdateRules) -> VerdictSet:
    """Verify a proof and return the set that it stands for.

    Raises:
        MessageError: If it is not valid, with the reason.
    """
    if isinstance(proof, SignedVerdict):
        _verify_verdict(proof, rules)
    else:
        _verify_fork(proof, rules)
    return VerdictSet.from_proof(proof)


def _verify_verdict(ruling: SignedVerdict, rules: UpdateRules) -> None:
    if len(ruling.body.encode()) > MAX_VERDICT_BYTES:
        raise MessageError(f"a verdict of more than {MAX_VERDICT_BYTES} bytes is refused")
    for key, signature in ruling.signatures.items():
        if key != rules.owner and key not in rules.mirrors:
            raise MessageError(
                f"a verdict is signed by {key[:8]}, neither the run's owner nor one of its mirrors"
            )
        signed = Signed(key=key, body=ruling.body, signature=signature)
        verdict = open_signed(signed, "verdict", Verdict)
        if verdict.run != rules.run:
            raise MessageError(f"a verdict is for run {verdict.run}, not {rules.run}")
    mirrors = len(ruling.signatures.keys() & rules.mirrors)
    if rules.owner not in ruling.signatures and mirrors < rules.threshold:
        raise MessageError(
            f"a verdict needs its run's owner or {rules.threshold} mirrors; {mirrors} signed it"
        )


def _verify_fork(fork: Fork, rules: UpdateRules) -> None:
    one = open_header(fork.one, rules)
    other = open_header(fork.other, rules)
    open_ticket(fork.ticket, one.peer, rules)
    if (one.author, one.seq) != (other.author, other.seq) or fork.one.body == fork.other.body:
        raise MessageError("the proof of a fork is not two different updates with one identity")


def _text(proof: Proof) -> str:
    return proof.model_dump_json()
