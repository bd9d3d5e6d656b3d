"""Compare verdict sets and log heads with linked peers, and send what differs (anti-entropy). Pure.

A State carries one digest of the sender's set of proofs. Peers whose digests differ find the
difference in the manner of a Merkle tree: the proofs' names, which are digests, are grouped by
their leading digits; groups with equal digests are left out, and of a small group the names are
sent. Each side then sends the proofs that the other lacks, so that both end with the union. No
message grows with the set, and both sides stay stateless but for the time of their last summary.

If version vector and verdicts are equal and the headers behind them are not, an author has forked:
each peer sends the other its authors' last headers, and a peer that receives two headers with one
identity has the proof.

Gossip (`gossip`) compares sequence numbers only; this module compares the contents behind them.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from barnraise.protocol.messages import PeerState
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import MAX_NAMES, VerdictNames, VerdictSummary

VERDICT_RESEND_SECONDS = 10.0  # before a peer that still reports other verdicts is sent ours again
HEADS_SECONDS = 3.0  # before headers are compared again
MAX_HEADS_SENT = 16  # authors whose last headers are sent at a time
# In a busy run two peers hardly ever have one vector, and an author may have forked and be silent:
# seconds between two samples of headers that a peer is sent in any case, and the headers of one.
SAMPLE_SECONDS = 60.0
SAMPLED_HEADS = 2
MAX_PROOF_BYTES = 1 << 20  # of proofs that a peer is sent until the next resend
MAX_ANSWERS = 64  # summaries and lists of names that a peer is sent until then
# Consecutive States: an update that is just being stored may be in one digest only.
MIN_MISMATCHES = 2
_DIGITS = "0123456789abcdef"


@dataclass(frozen=True)
class CompareVerdicts:
    """Send this peer a summary, or the names, of our proofs."""

    to: str
    message: VerdictSummary | VerdictNames


@dataclass(frozen=True)
class SendProofs:
    """Send these of our proofs to this peer."""

    to: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class SendHeads:
    """Send the last headers of some of our authors to this peer."""

    to: str
    count: int = MAX_HEADS_SENT


VerdictAction = CompareVerdicts | SendProofs | SendHeads


class ProofIndex:
    """The names of our proofs, sorted, with the bytes of each proof."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """Index the names; `sizes` maps each to the bytes of its proof."""
        self.sizes = dict(sizes)
        self._names = sorted(sizes)

    def names_under(self, prefix: str) -> list[str]:
        """Return the names that begin with `prefix`."""
        end = bisect_left(self._names, prefix + "g")  # "g" follows every digit
        return self._names[bisect_left(self._names, prefix) : end]

    def summarise(self, prefix: str) -> VerdictSummary:
        """Return the digests of the names under each longer prefix."""
        groups = (self.names_under(prefix + digit) for digit in _DIGITS)
        digests = [digest("\n".join(names)) if names else None for names in groups]
        return VerdictSummary(prefix=prefix, digests=digests)

    def describe(self, prefix: str) -> VerdictSummary | VerdictNames:
        """Return the names under a prefix, or their summary if they are many."""
        names = self.names_under(prefix)
        if len(names) > MAX_NAMES:
            return self.summarise(prefix)
        return VerdictNames(prefix=prefix, names=names)


@dataclass
class PeerVerdicts:
    """What a linked peer reported last."""

    # Digest of its verdict set; None for the empty set.
    verdicts: str | None = None
    # When it may be sent a description of our verdicts (again), in seconds.
    next_verdicts_at: float = -math.inf
    mismatches: int = 0  # in how many consecutive States its headers differed from ours
    next_heads_at: float = -math.inf  # when it may be sent our headers (again), in seconds
    # When it is sent a sample of them in any case; None before that is known.
    next_sample_at: float | None = None
    window_ends_at: float = -math.inf  # when the two following allowances are renewed, in seconds
    proof_bytes: int = MAX_PROOF_BYTES  # how many bytes of proofs it may still be sent
    answers: int = MAX_ANSWERS  # how many descriptions it may still be sent


class VerdictSync:
    """The verdict sets of the linked peers, compared with ours, which is empty at first."""

    def __init__(self) -> None:
        self._verdicts: str | None = None  # digest of our verdict set; None for the empty set
        self._index = ProofIndex({})
        self._peers: dict[str, PeerVerdicts] = {}

    def on_state(self, key: str, state: PeerState, same_vector: bool, heads: str) -> bool:
        """Record a peer's State. `heads` is the digest of our authors' last headers.

        Returns:
            Whether its verdicts or its headers differ from ours.
        """
        peer = self._peers.setdefault(key, PeerVerdicts())
        peer.verdicts = state.verdicts_digest
        differs = (
            same_vector
            and state.verdicts_digest == self._verdicts
            and state.heads_digest not in (None, heads)
        )
        peer.mismatches = peer.mismatches + 1 if differs else 0
        return differs or state.verdicts_digest != self._verdicts

    def on_verdicts(
        self, verdicts: str | None, sizes: Mapping[str, int], is_urgent: bool = True
    ) -> None:
        """Record our verdict set, by the bytes of each proof.

        Peers with another one get it at once if it is urgent; else after VERDICT_RESEND_SECONDS,
        together with what has changed by then.
        """
        self._verdicts = verdicts
        self._index = ProofIndex(sizes)
        for peer in self._peers.values() if is_urgent else ():
            peer.next_verdicts_at = -math.inf

    def on_disconnected(self, key: str) -> None:
        """Forget a peer."""
        self._peers.pop(key, None)

    def has_same_verdicts(self, key: str) -> bool:
        """Return whether this peer retracts the same updates as this machine."""
        return key in self._peers and self._peers[key].verdicts == self._verdicts

    def on_summary(self, key: str, summary: VerdictSummary, now: float) -> list[VerdictAction]:
        """Return the answer to a peer's summary: our names, or finer summaries, where we differ."""
        own = self._index.describe(summary.prefix)
        if isinstance(own, VerdictNames):
            return self._answer(key, own, now)
        actions: list[VerdictAction] = []
        for digit, theirs, ours in zip(_DIGITS, summary.digests, own.digests, strict=True):
            if theirs != ours and len(summary.prefix) < 63:
                actions += self._answer(key, self._index.describe(summary.prefix + digit), now)
        return actions

    def on_names(self, key: str, received: VerdictNames, now: float) -> list[VerdictAction]:
        """Return the answer to a peer's names: the proofs that it lacks, and our own names."""
        own = self._index.names_under(received.prefix)
        theirs = set(received.names)
        peer = self._renew_allowances(key, now)
        missing: list[str] = []
        for name in own:
            size = self._index.sizes[name]
            if name in theirs or size > peer.proof_bytes:
                continue
            peer.proof_bytes -= size
            missing.append(name)
        actions: list[VerdictAction] = [SendProofs(key, tuple(missing))] if missing else []
        if not received.is_answer and not theirs <= set(own) and len(own) <= MAX_NAMES:
            names = VerdictNames(prefix=received.prefix, names=own, is_answer=True)
            actions += self._answer(key, names, now)
        return actions

    def _answer(
        self, key: str, message: VerdictSummary | VerdictNames, now: float
    ) -> list[VerdictAction]:
        """Return a description as an action, within the peer's allowance."""
        peer = self._renew_allowances(key, now)
        if peer.answers <= 0:
            return []
        peer.answers -= 1
        return [CompareVerdicts(key, message)]

    def _renew_allowances(self, key: str, now: float) -> PeerVerdicts:
        """Return a peer, with new allowances if an interval has passed."""
        peer = self._peers.setdefault(key, PeerVerdicts())
        if now >= peer.window_ends_at:
            peer.window_ends_at = now + VERDICT_RESEND_SECONDS
            peer.proof_bytes = MAX_PROOF_BYTES
            peer.answers = MAX_ANSWERS
        return peer

    def next_actions(self, now: float) -> list[VerdictAction]:
        """Return what to send now and schedule when it may be sent again."""
        actions: list[VerdictAction] = []
        for key, peer in self._peers.items():
            has_other_verdicts = self._verdicts is not None and peer.verdicts != self._verdicts
            if has_other_verdicts and now >= peer.next_verdicts_at:
                peer.next_verdicts_at = now + VERDICT_RESEND_SECONDS
                actions.append(CompareVerdicts(key, self._index.describe("")))
            if peer.mismatches >= MIN_MISMATCHES and now >= peer.next_heads_at:
                peer.next_heads_at = now + HEADS_SECONDS
                actions.append(SendHeads(key))
            if peer.next_sample_at is None or now >= peer.next_sample_at:
                if peer.next_sample_at is not None:
                    actions.append(SendHeads(key, SAMPLED_HEADS))
                peer.next_sample_at = now + SAMPLE_SECONDS
        return actions
