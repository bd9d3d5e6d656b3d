"""Judge by their content whether the others' updates contribute to the training. Pure.

An update states its training tokens, and nothing proves that it contains this training. The tokens
of one author reduce the weight of all other authors. However, machines that train the same model on
similar text change it in similar directions. In the exchange's study, the updates of two honest
machines have a cosine of 0.4 to 0.7. Empty updates and noise have a cosine of 0. Small copies of
other updates have a high cosine, but they are too small for the tokens that they state.

This machine sums the changes of each volunteer during its own last rounds and compares each sum
with the sum of its own changes. It compares random elements of the model that no other machine
knows. `weighting.py` computes the weights from the result.

Updates of one value in 64 of two machines have few values in common, and agree half as much as
those of all values. Their sums over more rounds agree more, so that more rounds are remembered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from barnraise.planning.round_limits import MAX_SILENT_ROUNDS
from barnraise.protocol.table_sizes import FEW, store_newest

SAMPLES = 8192  # elements of the model that are compared
# What is remembered of the rounds before, at each of this machine's rounds: for dense updates or
# not.
ROUND_DECAY = {True: 0.8, False: 0.97}
MIN_ROUNDS = 2.0  # of this machine that are compared, at least
MIN_AGE_ROUNDS = 1.0  # of this machine after which a volunteer that it first heard of is judged


@dataclass
class _RecentChange:
    """The sum of one volunteer's recent changes."""

    # Fragment → its sampled elements, float32.
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    tokens: float = 0.0  # training tokens that the changes state
    age: float = 0.0  # rounds of this machine since the first change
    silence: float = 0.0  # rounds of this machine since the last one

    def add(self, fragment: int, sample: torch.Tensor) -> None:
        """Add the sampled elements of one update's part."""
        earlier = self.parts.get(fragment)
        self.parts[fragment] = sample if earlier is None else earlier.add_(sample)

    def decay(self, fragment: int, factor: float) -> None:
        """Remember a part of what was changed in a fragment."""
        if fragment in self.parts:
            self.parts[fragment].mul_(factor)

    def dot(self, other: "_RecentChange") -> float:
        """Return the scalar product of two changes."""
        common = self.parts.keys() & other.parts.keys()
        return sum(float(self.parts[i] @ other.parts[i]) for i in common)


class ContributionMeter:
    """Compare the others' recent updates with this machine's own.

    One thread calls the methods, but for `sample`, which any thread may call.

    Args:
        sizes: Elements of each fragment.
        seed: Selects the compared elements. It is secret, because a stranger that knew the elements
            could publish changes of these elements alone.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = sum(sizes)
        self._positions = [
            torch.randint(size, (-(-SAMPLES * size // total),), generator=generator)
            for size in sizes
        ]
        self._decay = ROUND_DECAY[True]
        self._own = _RecentChange()
        self._own_rounds = 0.0  # that are remembered
        self._others: dict[str, _RecentChange] = {}  # by volunteer, the last heard of at the end

    def set_dense(self, is_dense: bool) -> None:
        """Set whether this machine's updates hold all values, from the next round on."""
        self._decay = ROUND_DECAY[is_dense]

    def record_own_part(self, fragment: int, units: torch.Tensor) -> None:
        """Record what this machine's update changes in a fragment, in units: int32 [size]."""
        sample = self.sample(fragment, units)
        for change in (self._own, *self._others.values()):
            change.decay(fragment, self._decay)
        self._own.add(fragment, sample)

    def record_own_tokens(self, tokens: int, round_fraction: float) -> None:
        """Record the tokens of this machine's update, of a fraction of a round in (0, 1]."""
        decay = self._decay**round_fraction
        for change in (self._own, *self._others.values()):
            change.tokens *= decay
        self._own.tokens += tokens
        self._own_rounds = decay * self._own_rounds + round_fraction
        for volunteer, change in [*self._others.items()]:
            change.age += round_fraction
            change.silence += round_fraction
            if change.silence > MAX_SILENT_ROUNDS:
                del self._others[volunteer]

    def record_update(
        self, volunteer: str, samples: Sequence[torch.Tensor | None], tokens: int
    ) -> None:
        """Record what an update of another volunteer changes.

        Args:
            volunteer: Digest of the volunteer.
            samples: For each fragment its compared elements, float32; None if it does not change.
            tokens: The tokens that the update states.
        """
        change = self._find(volunteer)
        for fragment, sample in enumerate(samples):
            if sample is not None:
                change.add(fragment, sample)
        change.tokens += tokens
        change.silence = 0.0

    def agreements(self) -> dict[str, float]:
        """Return the agreement of each volunteer with this machine, in [-1, 1].

        Volunteers without enough updates are absent.
        """
        if self._own_rounds < MIN_ROUNDS or not self._own.tokens:
            return {}
        return {
            volunteer: self._agreement(change)
            for volunteer, change in self._others.items()
            if change.tokens and change.age >= MIN_AGE_ROUNDS
        }

    def _agreement(self, change: _RecentChange) -> float:
        """Return the agreement of a change with this machine's own change, in [-1, 1].

        The agreement is the cosine of the two changes. It is reduced if the change is smaller than
        the size that its tokens let expect. The expected size falls with the square of the speed of
        a slower machine, which makes fewer steps in a round and also has a lower weight.
        """
        own_norm, norm = self._own.dot(self._own) ** 0.5, change.dot(change) ** 0.5
        if not own_norm or not norm:
            return 0.0
        cosine = change.dot(self._own) / (norm * own_norm)
        speed = change.tokens / self._own.tokens
        expected_size = speed * min(1.0, speed)
        return cosine * min(1.0, norm / own_norm / expected_size)

    def sample(self, fragment: int, units: torch.Tensor) -> torch.Tensor:
        """Return the compared elements of a fragment's units (int32 [size]), as float32."""
        return units[self._positions[fragment]].to(torch.float32)

    def _find(self, volunteer: str) -> _RecentChange:
        """Return what a volunteer changed, which becomes the last one heard of."""
        change = self._others.get(volunteer) or _RecentChange()
        store_newest(self._others, volunteer, change, FEW)
        return change
