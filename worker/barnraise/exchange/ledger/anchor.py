"""The shared weights: initial integers plus every update applied, mod 2**32, in units of 2**-26.

Integer addition is exact, commutative and reversible, so that peers with the same set of updates hold the same bits
whatever the order they came in, and an update can be taken out again. The initial weights come from the run's seed by
integer arithmetic alone: the first volunteers download nothing.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from blake3 import blake3

from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.protocol.messages import Update
from barnraise.spec import UNIT_BITS, Fragment, ModelSpec, RunSpec

Retracted = Mapping[
    str, Mapping[int, int]
]  # author → number → tokens of updates that are out though later ones are in
DIVERGENCE_LIMIT = 1 << 30  # a weight this loud (16.0) means the run has gone wrong
_BLOCK = 1 << 20  # elements worked on at a time…
_CACHED = 1 << 15  # …and where that many wide integers would not stay in a core's cache
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SPREAD = (
    113_512  # 2**32 over the deviation of a sum of four uniform 16-bit integers, 2**16 · √(1/3)
)


def initial_weights(fragment: Fragment, seed: int) -> torch.Tensor:
    """int32[fragment.size] of initial weights; padding is zero.

    A "normal" slot's element i is the sum of the four 16-bit quarters of mix(key + i), centred and scaled to the slot's
    deviation (an Irwin-Hall distribution: nearly normal, never beyond 3.5 deviations), its key hashed from
    (seed, fragment, slot).
    """
    units = np.zeros(fragment.size, np.int32)
    for index, slot in enumerate(fragment.slots):
        part = units[slot.offset : slot.offset + slot.size]
        if slot.initial == "ones":
            part[:] = 1 << UNIT_BITS
        elif slot.initial == "normal":
            key = _mix_one(_mix_one(_mix_one(seed & _MASK) ^ fragment.index) ^ index)
            for start in range(0, slot.size, _BLOCK):
                block = part[start : start + _BLOCK]
                words = _mix(
                    np.arange(start, start + block.size, dtype=np.uint64) * np.uint64(_GOLDEN)
                    + np.uint64(key)
                )
                centred = (
                    words.view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int64) - 2 * 0xFFFF
                )
                block[:] = (centred * (slot.deviation * _SPREAD) + (1 << 31)) >> 32
    return torch.from_numpy(units)


def compute_sketch(values: torch.Tensor) -> str:
    """Σ rⱼ·uⱼ mod 2⁶⁴ over int32[n] `values`, as 16 hex digits. Linear: the sketch of a sum is the sum of the sketches.

    rⱼ is odd, fixed, and looks random by position (a table's entry times a factor for each megabyte of positions).
    Guards against accidents, not attackers: those are what signed BLAKE3 digests are for.
    """
    total = 0
    array = values.numpy()
    for start in range(0, array.size, _CACHED):
        block, place = divmod(start, _BLOCK)
        part = array[start : start + _CACHED].astype(np.int64).view(np.uint64)
        part *= _table()[place : place + part.size]
        total += int(part.sum(dtype=np.uint64)) * (_mix_one(_GOLDEN ^ block) | 1)
    return f"{total & _MASK:016x}"


def add_sketches(one: str, other: str, times: int = 1) -> str:
    """The sketch of `one` plus `other`, taken `times` times."""
    return f"{(int(one, 16) + times * int(other, 16)) & _MASK:016x}"


class FragmentStorage(Protocol):
    """int32[n] a fragment, in index order. What is changed must be put back: a fragment may be a copy from disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> torch.Tensor: ...

    def __setitem__(self, index: int, units: torch.Tensor, /) -> None: ...

    def __iter__(self) -> Iterator[torch.Tensor]: ...


@dataclass(frozen=True)
class Retraction:
    """An update that is not to be in the sum. `times`: what its integers are added by, -1, or 0 when they are not in.

    `single`: its author's later ones stay (or come). Else it is its author's last in the anchor, and `before` will be;
    None: nothing of that author is left."""

    update: Update
    multiplier: int
    single: bool
    previous: Update | None = None
    tokens: int = 0  # that a single one is counted with, by the verdict


class Anchor:
    """The weights in `fragments` (ours to change) and, by `heads`, whose updates they hold.

    `heads` maps each author to the header of the last update applied: updates of one author go in whole and in order.
    `holes`: author → number → tokens of those that a verdict took out from among them. `sums`: each fragment's sketch
    as it must be, by what those say who put something in; None where the beginning is not known. `held`: the fragments
    are in memory, and not read from disk at every look.
    """

    def __init__(
        self, fragments: FragmentStorage, heads: dict[str, Update] | None = None, held: bool = True
    ):
        self.fragments, self.in_memory = fragments, held
        self.restore(heads or {}, {}, [])

    def restore(self, heads: dict[str, Update], holes: Retracted, sums: Sequence[str]) -> None:
        """The fragments are there already, and hold this. `sums` empty: unknown."""
        self.heads = dict(heads)
        self.retracted = {author: dict(gone) for author, gone in holes.items()}
        self.expected_sketches = list(sums) or None

    @classmethod
    def from_seed(cls, model: ModelSpec, seed: int) -> "Anchor":
        made = cls([initial_weights(fragment, seed) for fragment in model.fragments()])
        made.expected_sketches = [compute_sketch(fragment) for fragment in made.fragments]
        return made

    def load(
        self,
        fragments: Iterable[torch.Tensor],
        heads: dict[str, Update],
        holes: Retracted | None = None,
    ) -> None:
        """Becomes what others, or the seed, say; one fragment after the other."""
        sums = []
        for index, units in enumerate(fragments):
            sums.append(compute_sketch(units))
            self.fragments[index] = units
        self.restore(heads, holes or {}, sums)

    def copy_fragments(self, folder: Path) -> Sequence[torch.Tensor]:
        """The fragments as they are now: a copy in memory, or in a file of `folder` that goes with the copy, for an
        anchor that memory does not hold."""
        if self.in_memory:
            return [fragment.clone() for fragment in self.fragments]
        return _Copied(folder, self.fragments)

    @property
    def vector(self) -> dict[str, int]:
        return {author: head.seq for author, head in sorted(self.heads.items())}

    @property
    def tokens(self) -> int:
        """Tokens that everybody spent on what is in here: the one clock all peers share."""
        return sum(head.total for head in self.heads.values()) - sum(
            sum(gone.values()) for gone in self.retracted.values()
        )

    def add_units(self, index: int, units: torch.Tensor) -> None:
        """Adds int32 units to fragment `index`, mod 2**32. `note` the header once all fragments are in."""
        self.fragments[index] = self.fragments[index].add_(units)

    def subtract_units(self, index: int, units: torch.Tensor) -> None:
        self.fragments[index] = self.fragments[index].sub_(units)

    def record(self, header: Update | Retraction) -> None:
        """All fragments of this update are in, as its author's next; or they are out again."""
        if isinstance(header, Retraction):
            self._withdrawn(header)
            return
        self._follow(header)
        self._count(header, 1)

    def _follow(self, header: Update) -> None:
        before = self.heads.get(header.author)
        assert header.seq == (before.seq if before else 0) + 1, (
            f"{header.author[:8]} {header.seq} is out of order"
        )
        self.heads[header.author] = header

    def _withdrawn(self, gone: Retraction) -> None:
        update, author = gone.update, gone.update.author
        holes = self.retracted.get(author, {})
        if gone.single:
            if author not in self.heads or update.seq > self.heads[author].seq:
                self._follow(update)
            self.retracted[author] = holes | {update.seq: gone.tokens}
        else:
            assert self.heads[author].seq == update.seq, (
                f"{author[:8]} {update.seq} is not its last"
            )
            left = {seq: tokens for seq, tokens in holes.items() if seq < update.seq}
            self.retracted.pop(author, None)
            self.retracted |= {author: left} if left else {}
            if gone.previous is None:
                del self.heads[author]
            else:
                self.heads[author] = gone.previous
        self._count(update, gone.multiplier)

    def _count(self, header: Update, times: int) -> None:
        if self.expected_sketches is not None:
            for index, part in enumerate(header.fragments):
                self.expected_sketches[index] = add_sketches(
                    self.expected_sketches[index], part.sketch, times=times
                )

    def digest(self) -> str:
        """BLAKE3 over all fragments in order, as little-endian int32: equal on peers with equal vectors."""
        hasher = blake3()
        for fragment in self.fragments:
            hasher.update(fragment_to_bytes(fragment))
        return hasher.hexdigest()

    def fragment_digest(self, index: int) -> str:
        return blake3(fragment_to_bytes(self.fragments[index])).hexdigest()

    def fragment_sketch(self, index: int) -> str:
        return compute_sketch(self.fragments[index])

    def checksum(self) -> str:
        """All fragments' sketches in one: the sum of them, each as often as its place says."""
        sums = self.expected_sketches or [
            self.fragment_sketch(index) for index in range(len(self.fragments))
        ]
        total = "0" * 16
        for place, each in enumerate(sums, 1):
            total = add_sketches(total, each, times=2 * place - 1)
        return total

    def is_intact(self, index: int, units: torch.Tensor | None = None) -> bool:
        """Whether a fragment (or `units`, in its place) has the sketch that its updates add up to. The lower halves are
        compared: a weight that wrapped around changes the upper one, a single damaged weight always the lower."""
        assert self.expected_sketches is not None
        found = self.fragment_sketch(index) if units is None else compute_sketch(units)
        return found[8:] == self.expected_sketches[index][8:]

    def largest_magnitude(self) -> int:
        """The largest |weight| in units, for the alarm over 2**30."""
        return max(max(int(f.max()), -int(f.min())) for f in self.fragments)


class _Copied(Sequence[torch.Tensor]):
    """Fragments in a file without a name: whatever ends this process, it is gone."""

    def __init__(self, folder: Path, fragments: Iterable[torch.Tensor]):
        self._file, self._sizes = tempfile.TemporaryFile(dir=folder), []  # noqa: SIM115 -- closed with the last reader
        for fragment in fragments:
            self._file.write(fragment_to_bytes(fragment))
            self._sizes.append(4 * fragment.numel())

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        index = range(len(self))[index]
        self._file.seek(sum(self._sizes[:index]))
        return fragment_from_bytes(self._file.read(self._sizes[index]))


def fragment_to_bytes(fragment: torch.Tensor) -> memoryview:
    """int32[n] as little-endian bytes, without a copy where the machine is little-endian."""
    return memoryview(fragment.numpy().astype("<i4", copy=False)).cast("B")


def fragment_from_bytes(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, "<i4").astype(np.int32))


def load_initial_fragment(spec: RunSpec, index: int, blobs: BlobStore) -> torch.Tensor | None:
    """int32 [n] that a fragment is before the first update: the seed's, or what the run takes over from another; None
    where that is not in `blobs`, or not sound."""
    if not spec.start.run:
        return initial_weights(spec.model.fragments()[index], spec.seed)
    data = blobs.read_verified(spec.start.fragments[index])
    return None if data is None else fragment_from_bytes(data)


@cache
def _table() -> np.ndarray:
    return _mix(np.arange(_BLOCK, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), in place over uint64."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _mix_one(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
