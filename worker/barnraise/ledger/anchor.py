"""The anchor: the shared model as initial weights plus every accepted update.

A weight is an int32 in units of 2⁻²⁶, and sums are modulo 2³². Integer addition is exact,
commutative and reversible, so that peers with the same set of updates have identical bits whatever
the order of arrival, and an update can be subtracted again. The initial weights follow from the
run's seed by integer arithmetic alone: the first peers download nothing. "Anchor model" is the term
of Overlap Local-SGD (Wang et al., arXiv 2002.09539).
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from blake3 import blake3

from barnraise.ledger.blob_store import BlobStore
from barnraise.protocol.messages import FragmentUpdate, Update
from barnraise.protocol.signing import digest
from barnraise.spec import UNIT_BITS, Fragment, RunSpec

# Author → sequence number → tokens of retracted updates whose successors count.
Retracted = Mapping[str, Mapping[int, int]]

ABSENCE_MS = 3600 * 1000  # without an update, after which vouched volunteers count as gone
_BLOCK = 1 << 20  # elements processed at a time
_CACHED_BLOCK = 1 << 15  # elements whose 64-bit integers stay in a core's cache
_GOLDEN = 0x9E3779B97F4A7C15  # increment of SplitMix64
_MASK = (1 << 64) - 1
# A sum of four uniform 16-bit integers has the deviation 2**16 · √(1/3); this is 2**32 over that.
_UNITS_PER_DEVIATION = 113_512


def initial_weights(fragment: Fragment, seed: int) -> torch.Tensor:
    """Return the initial weights of a fragment; padding is zero.

    A "normal" slot's element i is the sum of the four 16-bit quarters of mix(key + i · golden),
    centred and scaled to the slot's deviation: an Irwin-Hall distribution, which is nearly normal
    and never beyond 3.5 deviations. The key is hashed from (seed, fragment, slot), and mix is the
    finaliser of SplitMix64.

    Returns:
        int32[fragment.size] in units of 2⁻²⁶.
    """
    units = np.zeros(fragment.size, np.int32)
    for index, slot in enumerate(fragment.slots):
        part = units[slot.offset : slot.offset + slot.size]
        if slot.initial == "ones":
            part[:] = 1 << UNIT_BITS
        elif slot.initial == "normal":
            key = _mix_int(_mix_int(_mix_int(seed & _MASK) ^ fragment.index) ^ index)
            for start in range(0, slot.size, _BLOCK):
                block = part[start : start + _BLOCK]
                block[:] = _irwin_hall(start, block.size, key, slot.deviation)
    return torch.from_numpy(units)


def _irwin_hall(start: int, count: int, key: int, deviation: int) -> np.ndarray:
    """Return int64[count] of pseudo-random units for the elements from `start` on."""
    counter = np.arange(start, start + count, dtype=np.uint64)
    words = _mix(counter * np.uint64(_GOLDEN) + np.uint64(key))
    quarters = words.view(np.uint16).reshape(-1, 4)
    centred = quarters.sum(axis=1, dtype=np.int64) - 2 * 0xFFFF
    return (centred * (deviation * _UNITS_PER_DEVIATION) + (1 << 31)) >> 32


def compute_sketch(values: torch.Tensor) -> str:
    """Compute a linear sketch of a tensor: the sketch of a sum is the sum of the sketches.

    The sketch is Σ rⱼ·uⱼ mod 2⁶⁴, where uⱼ are the values and rⱼ is odd, fixed and pseudo-random by
    position: an entry of a table times a factor for each 2²⁰ positions. It guards against
    accidents, not attackers; signed BLAKE3 digests guard against those.

    Args:
        values: int32[n].

    Returns:
        16 hex digits.
    """
    total = 0
    array = values.numpy()
    for start in range(0, array.size, _CACHED_BLOCK):
        block, offset = divmod(start, _BLOCK)
        part = array[start : start + _CACHED_BLOCK].astype(np.int64).view(np.uint64)
        part *= _sketch_table()[offset : offset + part.size]
        total += int(part.sum(dtype=np.uint64)) * (_mix_int(_GOLDEN ^ block) | 1)
    return f"{total & _MASK:016x}"


def add_sketches(one: str, other: str, times: int = 1) -> str:
    """Return the sketch of `one` plus `times` times `other`."""
    return f"{(int(one, 16) + times * int(other, 16)) & _MASK:016x}"


class FragmentStorage(Protocol):
    """The anchor's fragments, int32[n] each, in index order.

    A fragment may be a copy from disk, so a changed one must be assigned back.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> torch.Tensor: ...

    def __setitem__(self, index: int, units: torch.Tensor, /) -> None: ...

    def __iter__(self) -> Iterator[torch.Tensor]: ...


@runtime_checkable
class RemoteStorage(Protocol):
    """Fragments that partly lie on other machines, which compute their sketches."""

    def compute_sketch(self, index: int) -> str:
        """Return the sketch of a fragment."""
        ...


@dataclass(frozen=True)
class Retraction:
    """An update that must not be in the sum."""

    update: Update
    # How its integers are added: -1 to subtract them, 0 if they are not in the sum, 1 to add a
    # single update again that no verdict retracts any longer.
    multiplier: int
    # Whether its author's later updates count. If not, it is its author's last update in the
    # anchor.
    single: bool
    # Its author's update before it, which becomes the last, unless `single`; None if there is none.
    previous: Update | None = None
    tokens: int = 0  # the tokens that the verdict states for a single update


@dataclass(frozen=True)
class Withdrawal:
    """What this machine has added to the sum, and what did not enter the ledger."""

    fragments: Sequence[FragmentUpdate]  # in index order; their integers are subtracted again
    tokens: int  # that this machine trained on for it


class Anchor:
    """The weights, and which updates they contain.

    Attributes:
        fragments: The weights.
        in_memory: Whether the fragments are in memory, not read from disk on every access.
        heads: Author → header of its last update in the sum. An author's updates are added whole
            and in order.
        retracted: The single updates among those that verdicts took out.
        expected_sketches: For each fragment the sketch that it must have, by the updates' headers;
            None if unknown.
    """

    def __init__(
        self,
        fragments: FragmentStorage,
        heads: dict[str, Update] | None = None,
        in_memory: bool = True,
    ) -> None:
        """Wrap fragments, which this object will change."""
        self.fragments = fragments
        self.in_memory = in_memory
        self._vouched: frozenset[str] | None = None
        self.restore(heads or {}, {}, [])

    def restore(
        self, heads: dict[str, Update], retracted: Retracted, sketches: Sequence[str]
    ) -> None:
        """Set what the fragments contain, without changing them.

        Args:
            heads: Author → header of its last update in the weights.
            retracted: The single updates that are out of the weights.
            sketches: For each fragment the sketch that it must have; empty if unknown.
        """
        self.heads = dict(heads)
        self.retracted = {author: dict(updates) for author, updates in retracted.items()}
        self.expected_sketches = list(sketches) or None

    def load(
        self,
        fragments: Iterable[torch.Tensor],
        heads: dict[str, Update],
        retracted: Retracted | None = None,
    ) -> None:
        """Replace all fragments, one after the other, and what they contain.

        Args:
            fragments: int32[n] for each fragment.
            heads: Author → header of its last update in them.
            retracted: The single updates that are out of them.
        """
        sketches: list[str] = []
        for index, units in enumerate(fragments):
            sketches.append(compute_sketch(units))
            self.fragments[index] = units
        self.restore(heads, retracted or {}, sketches)

    def copy_fragments(self, folder: Path) -> Sequence[torch.Tensor]:
        """Copy the fragments as they are now.

        The copy is in memory. If the anchor is on disk, it is in a temporary file in `folder` that
        is deleted with it.
        """
        if self.in_memory:
            return [fragment.clone() for fragment in self.fragments]
        return _FragmentFile(folder, self.fragments)

    @property
    def vector(self) -> dict[str, int]:
        """Return the version vector: author → sequence number of its last update in the sum."""
        return {author: head.seq for author, head in sorted(self.heads.items())}

    def set_vouched(self, vouched: frozenset[str] | None) -> None:
        """Set which volunteers are vouched for; None if the run's owner vouches for nobody."""
        self._vouched = vouched

    @property
    def tokens(self) -> int:
        """Return the training tokens that count of all updates in the sum, see `count_useful`.

        Schedules and the end of the run follow them: the clock that all peers share.
        """
        volunteers = {author: head.volunteer for author, head in self.heads.items()}
        return count_useful(
            {
                author: TokenClaim(
                    head.started_ms,
                    head.time_ms,
                    head.total - sum(self.retracted.get(author, {}).values()),
                )
                for author, head in self.heads.items()
            },
            volunteers,
            self._vouched,
        )

    def record(self, header: Update | Retraction | Withdrawal) -> None:
        """Record that all fragments of an update have been added, or subtracted again.

        What is withdrawn was never recorded.
        """
        if isinstance(header, Retraction):
            self._record_retraction(header)
        elif isinstance(header, Update):
            self._advance(header)
            self._update_sketches(header, 1)

    def _advance(self, header: Update) -> None:
        """Make this update its author's last."""
        last = self.heads.get(header.author)
        assert header.seq == (last.seq if last else 0) + 1, (
            f"{header.author[:8]} {header.seq} is out of order"
        )
        self.heads[header.author] = header

    def _record_retraction(self, retraction: Retraction) -> None:
        update = retraction.update
        author = update.author
        retracted = self.retracted.get(author, {})
        if retraction.single and retraction.multiplier > 0:
            retracted = {seq: tokens for seq, tokens in retracted.items() if seq != update.seq}
        elif retraction.single:
            if author not in self.heads or update.seq > self.heads[author].seq:
                self._advance(update)
            retracted = retracted | {update.seq: retraction.tokens}
        else:
            assert self.heads[author].seq == update.seq, (
                f"{author[:8]} {update.seq} is not its last"
            )
            retracted = {seq: tokens for seq, tokens in retracted.items() if seq < update.seq}
            if retraction.previous is None:
                del self.heads[author]
            else:
                self.heads[author] = retraction.previous
        self.retracted.pop(author, None)
        if retracted:
            self.retracted[author] = retracted
        self._update_sketches(update, retraction.multiplier)

    def _update_sketches(self, header: Update, multiplier: int) -> None:
        if self.expected_sketches is not None:
            for index, part in enumerate(header.fragments):
                self.expected_sketches[index] = add_sketches(
                    self.expected_sketches[index], part.sketch, times=multiplier
                )

    def digest(self) -> str:
        """Compute BLAKE3 over all fragments in order: equal for equal sets of updates."""
        return digest_fragments(self.fragments)

    def vector_digest(self) -> str:
        """Compute the digest of the set of updates in the anchor, see `digest_vector`."""
        return digest_vector(self.vector, self.retracted)

    def checksum(self) -> str:
        """Combine the fragments' sketches: the sum of the i-th times 2i - 1, counting from 1."""
        sketches = self.expected_sketches or map(self._sketch_of, range(len(self.fragments)))
        total = "0" * 16
        for number, fragment_sketch in enumerate(sketches, 1):
            total = add_sketches(total, fragment_sketch, times=2 * number - 1)
        return total

    def _sketch_of(self, index: int) -> str:
        if isinstance(self.fragments, RemoteStorage):
            return self.fragments.compute_sketch(index)
        return compute_sketch(self.fragments[index])

    def is_intact(self, index: int, units: torch.Tensor | None = None) -> bool:
        """Return whether a fragment has the sketch that its updates add up to.

        The lower halves of the sketches are compared: a weight that wrapped around changes the
        upper half, but one damaged weight always changes the lower.

        Args:
            index: The fragment.
            units: int32[n] to verify in place of the stored fragment.
        """
        assert self.expected_sketches is not None
        sketch = self._sketch_of(index) if units is None else compute_sketch(units)
        return sketch[8:] == self.expected_sketches[index][8:]


class _FragmentFile(Sequence[torch.Tensor]):
    """Fragments in a file without a name, which disappears with this process."""

    def __init__(self, folder: Path, fragments: Iterable[torch.Tensor]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 -- closed with the last reader
        self._sizes: list[int] = []
        for fragment in fragments:
            self._file.write(fragment_to_bytes(fragment))
            self._sizes.append(4 * fragment.numel())

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        index = range(len(self))[index]
        self._file.seek(sum(self._sizes[:index]))
        return fragment_from_bytes(self._file.read(self._sizes[index]))


def digest_fragments(fragments: Iterable[torch.Tensor]) -> str:
    """Compute BLAKE3 over fragments, int32[size] each, in order."""
    hasher = blake3()
    for fragment in fragments:
        hasher.update(fragment_to_bytes(fragment))
    return hasher.hexdigest()


def digest_vector(vector: Mapping[str, int], retracted: Retracted) -> str:
    """Compute the digest of a set of updates, by which coordinators compare anchors.

    Machines with equal digests must have bit-identical anchors.

    Args:
        vector: Author → sequence number of its last update in the set.
        retracted: The single updates that are not in the set.
    """
    content = [dict(vector), retracted] if retracted else dict(vector)
    return digest(json.dumps(content, sort_keys=True))


def fragment_to_bytes(fragment: torch.Tensor) -> memoryview:
    """Return int32[n] as little-endian bytes, without a copy on little-endian machines."""
    return fragment.numpy().astype("<i4", copy=False).data.cast("B")


def fragment_from_bytes(data: bytes | bytearray) -> torch.Tensor:
    """Return the int32[n] of little-endian bytes."""
    return torch.from_numpy(np.frombuffer(data, "<i4").astype(np.int32))


def load_initial_fragment(spec: RunSpec, index: int, blobs: BlobStore) -> torch.Tensor | None:
    """Return a fragment before the first update.

    It comes from the seed, or from the run or model that this run begins with.

    Returns:
        int32[n]; None if the blob is not here or damaged.
    """
    if not spec.start.has_weights:
        return initial_weights(spec.model.fragments()[index], spec.seed)
    data = blobs.read_verified(spec.start.fragments[index])
    return None if data is None else fragment_from_bytes(data)


def load_initial_fragments(spec: RunSpec, blobs: BlobStore) -> Iterator[torch.Tensor]:
    """Yield the fragments, int32 [n], with which a run begins; their blobs must be here."""
    for fragment in spec.model.fragments():
        units = load_initial_fragment(spec, fragment.index, blobs)
        assert units is not None, "the caller has fetched and verified them"
        yield units


@cache
def _sketch_table() -> np.ndarray:
    return _mix(np.arange(_BLOCK, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) to uint64, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _mix_int(x: int) -> int:
    """Apply the same finaliser to one integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class TokenClaim:
    """What one author, which is one incarnation of a key, states."""

    started_ms: int  # when it began to train, in milliseconds since 1970
    time_ms: int  # when it signed its last update
    tokens: int  # the tokens of its updates that count

    def until(self, time_ms: int) -> "TokenClaim":
        """Return what it states up to a time, if its tokens are spread evenly."""
        if time_ms >= self.time_ms:
            return self
        end_ms = max(time_ms, self.started_ms)
        part_ms, whole_ms = end_ms - self.started_ms, self.time_ms - self.started_ms
        return TokenClaim(self.started_ms, end_ms, self.tokens * part_ms // whole_ms)


def count_tokens(claims: Mapping[str, TokenClaim]) -> int:
    """Return the tokens that count of all authors, so that nobody counts the same time twice.

    Each update states no more tokens than its ticket allows for the time since its author's
    previous update (`validation`). A key may have several incarnations, each with a chain of its
    own, and could state the same time in all of them. So the tokens of one key are counted once for
    each moment: an incarnation's tokens are spread evenly over the time from its start to its last
    update, and what falls into the time of an incarnation that started earlier does not count. An
    honest machine's incarnations follow each other, and all their tokens count. The count depends
    only on the set of updates, not on the order in which they arrived.

    Args:
        claims: Author (key.incarnation) → what it states.
    """
    return sum(count_tokens_by_key(claims).values())


def count_useful(
    claims: Mapping[str, TokenClaim],
    volunteers: Mapping[str, str],
    vouched: frozenset[str] | None,
) -> int:
    """Return the tokens that spend the budget: idle accounts state tokens, too.

    All volunteers that nobody vouches for together count at most as much as the vouched ones; of
    the time after these have left all counts, or a run whose owner's machine left would never end.

    Args:
        claims: Author → what it states.
        volunteers: Author → the volunteer that its updates name.
        vouched: The volunteers that are vouched for; None: all count in full.
    """
    if vouched is None:
        return count_tokens(claims)
    trusted = {a: claim for a, claim in claims.items() if volunteers.get(a) in vouched}
    others = {author: claim for author, claim in claims.items() if author not in trusted}
    left_ms = max((claim.time_ms for claim in trusted.values()), default=0) + ABSENCE_MS
    trusted_tokens, other_tokens = count_tokens(trusted), count_tokens(others)
    earlier = count_tokens({author: claim.until(left_ms) for author, claim in others.items()})
    return trusted_tokens + min(trusted_tokens, earlier) + max(0, other_tokens - earlier)


def count_tokens_by_key(claims: Mapping[str, TokenClaim]) -> dict[str, int]:
    """Return key → the tokens that count of all its authors, see `count_tokens`."""
    by_key: dict[str, list[tuple[str, TokenClaim]]] = {}
    for author, claim in claims.items():
        by_key.setdefault(author.partition(".")[0], []).append((author, claim))
    return {key: _count_key(authors) for key, authors in by_key.items()}


def _count_key(authors: Iterable[tuple[str, TokenClaim]]) -> int:
    """Return the tokens that count of one key's authors."""
    counted = 0
    covered_until_ms = 0
    for _, claim in sorted(authors, key=lambda item: (item[1].started_ms, item[0])):
        duration_ms = claim.time_ms - claim.started_ms
        new_ms = max(0, claim.time_ms - max(claim.started_ms, covered_until_ms))
        if new_ms:
            counted += claim.tokens * new_ms // duration_ms
        covered_until_ms = max(covered_until_ms, claim.time_ms)
    return counted
