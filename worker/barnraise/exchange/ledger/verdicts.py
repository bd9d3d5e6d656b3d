"""What is taken out of the sum again, and why everybody may believe it: a set of verdicts and forks that only grows.

A verdict is signed by the run's owner, or by as many of its mirrors as the spec asks for. A fork proves itself: two
updates with one identity, both signed by their author. Either cuts an author after its last good update; a verdict may
also name single ones. Who has the same set takes the same updates out, in whatever order and however often the proofs
came: merging is union, and of one author's forks the earliest counts. Pure.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from barnraise.errors import MessageError
from barnraise.exchange.ledger.validation import UpdateRules, validate_header
from barnraise.protocol.messages import Signed, Update
from barnraise.protocol.signing import digest, open_signed
from barnraise.protocol.types import Message
from barnraise.protocol.verdicts import MAX_VERDICT_BYTES, MAX_VERDICTS, SignedVerdict, Verdict

MAX_FORKS_PER_PEER = 64  # lives of one machine that are known to have forked


class Fork(Message):
    """Two different updates that one author signed under one number, and its ticket."""

    type: Literal["fork"] = "fork"
    one: Signed
    other: Signed
    ticket: Signed


Proof = SignedVerdict | Fork


@dataclass(frozen=True)
class VerdictSet:
    """`rulings` by the digest of their text; `forks` by author, with the number that was signed twice."""

    rulings: Mapping[str, SignedVerdict] = field(default_factory=dict)
    forks: Mapping[str, tuple[int, Fork]] = field(default_factory=dict)

    @classmethod
    def from_proof(cls, proof: Proof) -> "VerdictSet":
        """What one proof says; `believed` is for those that come from elsewhere."""
        if isinstance(proof, SignedVerdict):
            return cls({digest(proof.body): proof})
        update = Update.model_validate_json(proof.one.body)
        return cls(forks={update.author: (update.seq, proof)})

    def __or__(self, other: "VerdictSet") -> "VerdictSet":
        """Both together. Of two proofs of one thing the same one stays, whichever way they are merged."""
        rulings, forks = dict(self.rulings), dict(self.forks)
        for name, ruling in other.rulings.items():
            rulings[name] = min(rulings.get(name, ruling), ruling, key=_text)
        for author, found in other.forks.items():
            forks[author] = min(
                forks.get(author, found), found, key=lambda one: (one[0], _text(one[1]))
            )
        return VerdictSet(rulings, forks)

    def covers(self, other: "VerdictSet") -> bool:
        """Whether nothing of `other` is news."""
        return other.rulings.keys() <= self.rulings.keys() and all(
            author in self.forks and self.forks[author][0] <= seq
            for author, (seq, _) in other.forks.items()
        )

    def has_room_for(self, other: "VerdictSet") -> bool:
        """Whether more may be remembered: forks cost their author nothing."""
        keys = [author.partition(".")[0] for author in self.forks]
        return len(self.rulings.keys() | other.rulings.keys()) <= MAX_VERDICTS and all(
            author in self.forks or keys.count(author.partition(".")[0]) < MAX_FORKS_PER_PEER
            for author in other.forks
        )

    def proofs(self) -> Iterator[Proof]:
        yield from self.rulings.values()
        for _, fork in self.forks.values():
            yield fork

    # ---- what follows from it

    @cached_property
    def digest(self) -> str | None:
        """Equal for equal sets; None for the empty one."""
        names = [*self.rulings, *(f"{author} {seq}" for author, (seq, _) in self.forks.items())]
        return digest("\n".join(sorted(names))) if names else None

    @cached_property
    def limits(self) -> dict[str, int]:
        """Author → its last update that stays. Who is not in here is not cut."""
        found = {author: seq - 1 for author, (seq, _) in self.forks.items()}
        for verdict in self._verdicts:
            for author, last in verdict.after.items():
                found[author] = min(last, found.get(author, last))
        return found

    @cached_property
    def singles(self) -> dict[str, dict[int, int]]:
        """Author → number → tokens of the updates that are out though later ones stay."""
        found: dict[str, dict[int, int]] = {}
        for verdict in self._verdicts:
            for author, updates in verdict.updates.items():
                mine, limit = found.setdefault(author, {}), self.limits.get(author)
                for seq, tokens in updates.items():
                    if limit is None or seq <= limit:
                        mine[seq] = max(tokens, mine.get(seq, 0))
        return {
            author: dict(sorted(updates.items())) for author, updates in found.items() if updates
        }

    @cached_property
    def _verdicts(self) -> list[Verdict]:
        return [Verdict.model_validate_json(ruling.body) for ruling in self.rulings.values()]

    def is_retracted(self, author: str, seq: int) -> bool:
        """Whether this update is not to be in the sum."""
        return seq > self.limits.get(author, seq) or seq in self.singles.get(author, ())

    def clamp(self, vector: Mapping[str, int]) -> dict[str, int]:
        """What of a version vector stays."""
        found = {author: min(seq, self.limits.get(author, seq)) for author, seq in vector.items()}
        return {author: seq for author, seq in found.items() if seq}

    def retracted_within(self, vector: Mapping[str, int]) -> dict[str, dict[int, int]]:
        """The single ones that are out of an anchor at `vector`, with their tokens."""
        within = {
            author: {seq: tokens for seq, tokens in updates.items() if seq <= vector.get(author, 0)}
            for author, updates in self.singles.items()
        }
        return {author: updates for author, updates in within.items() if updates}


def verify_proof(proof: Proof, rules: UpdateRules) -> VerdictSet:
    """What a proof says, once it holds. Raises MessageError with the reason where it does not."""
    if isinstance(proof, SignedVerdict):
        _check_ruling(proof, rules)
    else:
        _check_fork(proof, rules)
    return VerdictSet.from_proof(proof)


def _check_ruling(ruling: SignedVerdict, rules: UpdateRules) -> None:
    if len(ruling.body.encode()) > MAX_VERDICT_BYTES:
        raise MessageError(f"a verdict of more than {MAX_VERDICT_BYTES} bytes is refused")
    for key, signature in ruling.signatures.items():
        if key != rules.owner and key not in rules.mirrors:
            raise MessageError(
                f"a verdict is signed by {key[:8]}, neither the run's owner nor one of its mirrors"
            )
        verdict = open_signed(
            Signed(key=key, body=ruling.body, signature=signature), "verdict", Verdict
        )
        if verdict.run != rules.run:
            raise MessageError(f"a verdict is for run {verdict.run}, not {rules.run}")
    mirrors = len(ruling.signatures.keys() & rules.mirrors)
    if rules.owner not in ruling.signatures and mirrors < rules.threshold:
        raise MessageError(
            f"a verdict needs its run's owner or {rules.threshold} mirrors; {mirrors} signed it"
        )


def _check_fork(fork: Fork, rules: UpdateRules) -> None:
    one, other = (validate_header(signed, fork.ticket, rules) for signed in (fork.one, fork.other))
    if (one.author, one.seq) != (other.author, other.seq) or fork.one.body == fork.other.body:
        raise MessageError("what was said to be a fork is not two updates with one identity")


def _text(proof: Proof) -> str:
    return proof.model_dump_json()
