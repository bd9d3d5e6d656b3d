"""Which of the peers' snapshots most volunteers agree on, and whose word is enough. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from barnraise.exchange.gossip.agreement import Votes
from barnraise.protocol.messages import SnapshotManifest


@dataclass(frozen=True)
class AgreedSnapshot:
    """A snapshot on which enough volunteers agree."""

    manifest: SnapshotManifest  # what they agree on
    tickets: Sequence[str]  # digests of their lists of tickets, those that most of them name first
    proofs: Sequence[str]  # the same for verdicts
    confirmed: bool  # False if votes do not suffice: the site, or the machine's owner, decides


def choose_majority(
    answers: Iterable[tuple[str, SnapshotManifest]], own: str, votes: Votes
) -> tuple[SnapshotManifest, list[frozenset[str]]] | None:
    """Combine the answers to one request into the snapshot that most volunteers agree on.

    The heads are those that most volunteers name, and each fragment is the one that most of these
    volunteers name, so that a damaged fragment costs its owner only that one vote. Pure.

    Args:
        answers: (volunteer, manifest) of each peer, all with equally many fragments. The machines
            of one volunteer count once.
        own: This machine's own volunteer, whose answer counts before all others.
        votes: Of the others.

    Returns:
        The snapshot, and for each part of it the volunteers that agree on it.
    """
    answers = list(answers)
    if not answers:
        return None
    name, agreeing = _most_votes(
        ((volunteer, f"{manifest.heads} {manifest.verdicts}") for volunteer, manifest in answers),
        own,
        votes,
    )
    answers = [
        (volunteer, manifest)
        for volunteer, manifest in answers
        if f"{manifest.heads} {manifest.verdicts}" == name
    ]
    first = answers[0][1]
    fragments: list[str] = []
    supporters = [agreeing]
    for index in range(len(first.fragments)):
        digest, agreeing = _most_votes(
            ((volunteer, manifest.fragments[index]) for volunteer, manifest in answers), own, votes
        )
        fragments.append(digest)
        supporters.append(agreeing)
    return first.model_copy(update={"fragments": fragments}), supporters


def _most_votes(
    answers: Iterable[tuple[str, str]], own: str, votes: Votes
) -> tuple[str, frozenset[str]]:
    """Return the digest that most votes, or the own volunteer, name; and who names it."""
    voters: dict[str, set[str]] = {}
    for volunteer, digest in answers:
        voters.setdefault(digest, set()).add(volunteer)
    best = max(voters, key=lambda digest: (own in voters[digest], votes.count(voters[digest])))
    return best, frozenset(voters[best])
