"""Tests of contributions: who agrees with this machine counts, and who says nothing does not."""

import hypothesis.strategies as st
import pytest
import torch
from helpers.wait_for import wait_until
from hypothesis import given

from barnraise.exchange.weights.contribution import ContributionMeter
from barnraise.exchange.weights.weighting import FULL_AGREEMENT, NO_AGREEMENT, contribution_factors
from barnraise.ledger.codec import encode
from barnraise.planning.round_limits import MAX_SILENT_ROUNDS
from barnraise.protocol.table_sizes import FEW

SIZES = (30_000, 60_000, 60_000, 30_000)
TOKENS = 10_000
SCALE = 5000.0  # units by which a round changes an element
SHARED = 0.7  # of an honest round's change is shared with the others': a cosine of 0.49


class Machines:
    """Machines whose rounds share a direction, and what one of them sees of the others."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.direction = [self.noise(size) for size in SIZES]
        self.meter = ContributionMeter(SIZES, seed=1)

    def noise(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.random)

    def change(self, scale: float = 1.0, shared: float = SHARED) -> list[torch.Tensor]:
        """Return an honest round's change, in units."""
        own = (1 - shared**2) ** 0.5
        return [
            (SCALE * scale * (shared * direction + own * self.noise(len(direction)))).int()
            for direction in self.direction
        ]

    def train_own(self, rounds: int = 1) -> None:
        """Publish rounds of this machine."""
        for _ in range(rounds):
            for fragment, units in enumerate(self.change()):
                self.meter.record_own_part(fragment, units)
            self.meter.record_own_tokens(TOKENS, 1.0)

    def receive(self, volunteer: str, parts: list[torch.Tensor], tokens: int = TOKENS) -> None:
        """Receive an update of a volunteer."""
        samples = [self.meter.sample(fragment, units) for fragment, units in enumerate(parts)]
        self.meter.record_update(volunteer, samples, tokens)

    def train(self, strangers: dict[str, float], rounds: int = 6) -> dict[str, float]:
        """Train among two honest machines and strangers, whose changes have these scales.

        Returns:
            The factors.
        """
        for _ in range(rounds):
            self.train_own()
            self.receive("ann", self.change())
            self.receive("ben", self.change())
            for volunteer, scale in strangers.items():
                self.receive(volunteer, self.change(scale), 30 * TOKENS)
        return self.factors()

    def factors(self) -> dict[str, float]:
        """Return by how much less each volunteer counts."""
        return contribution_factors(self.meter.agreements())


def test_honest_volunteers_count_in_full():
    assert Machines().train({}) == {"ann": 1.0, "ben": 1.0}


def test_updates_that_repeat_others_at_a_small_scale_count_for_nothing():
    """Their direction is right, and their tokens are 30 times those of the others."""
    assert Machines().train({"eve": 1.0}) == {"ann": 1.0, "ben": 1.0, "eve": 0.0}
    assert Machines().train({"eve": 30.0})["eve"] == 1.0, "it does as much as it states"


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 1000.0])
def test_noise_of_any_size_counts_for_nothing(scale):
    machines = Machines()
    for _ in range(6):
        machines.train({}, rounds=1)
        machines.receive("eve", machines.change(scale, shared=0.0), TOKENS)
    factors = machines.factors()
    assert factors["eve"] < 0.1 and factors["ann"] == 1.0


def test_updates_that_change_one_element_count_for_nothing():
    machines = Machines()
    for _ in range(6):
        machines.train({}, rounds=1)
        parts = [torch.zeros(size, dtype=torch.int32) for size in SIZES]
        parts[1][7] = 1
        machines.receive("eve", parts)
    assert machines.factors() == {"ann": 1.0, "ben": 1.0, "eve": 0.0}


@pytest.mark.parametrize("speed", [1 / 7, 0.5, 2.0, 7.0])
def test_slow_and_fast_honest_machines_count_in_full(speed):
    """A slow machine's update has a lower weight and fewer steps; its noise is larger."""
    machines = Machines()
    for _ in range(6):
        machines.train({}, rounds=1)
        shared = min(0.9, SHARED * speed**0.5)
        machines.receive("cleo", machines.change(speed * speed, shared), int(TOKENS * speed))
    assert machines.factors()["cleo"] == 1.0


def test_one_other_volunteer_is_not_judged():
    """Between two machines nobody can say which one is right."""
    machines = Machines()
    for _ in range(6):
        machines.train_own()
        machines.receive("eve", [torch.zeros(size, dtype=torch.int32) for size in SIZES])
    assert machines.factors() == {}


def test_nobody_is_judged_where_most_do_not_agree():
    """A liar that repeats this machine's own changes makes no honest machine count for less."""
    machines = Machines()
    for _ in range(6):
        own = machines.change(shared=0.0)
        for fragment, units in enumerate(own):
            machines.meter.record_own_part(fragment, units)
        machines.meter.record_own_tokens(TOKENS, 1.0)
        machines.receive("eve", own)
        machines.receive("ann", machines.change(shared=0.0))
        machines.receive("ben", machines.change(shared=0.0))
    assert machines.factors() == {}


def test_nobody_is_judged_before_two_rounds():
    machines = Machines()
    assert machines.train({"eve": 0.0}, rounds=1) == {}
    assert machines.train({"eve": 0.0}, rounds=2)["eve"] == 0.0


def agree_sparsely(rounds: int, remembers: bool) -> list[float]:
    """Train eight honest machines that send one value in 64, and return how much they agree.

    What an update leaves out is in the next one, as with the worker's error feedback. Their rounds
    are so little alike that with a short memory they agree by 0.24 to 0.38, as real trainings did.
    """
    machines, size, private = 8, 1 << 15, 2.2
    random = torch.Generator().manual_seed(59)
    meters = [ContributionMeter([size], seed) for seed in range(machines)]
    for meter in meters:
        meter.set_dense(not remembers)
    direction = torch.randn(size, generator=random)
    scale = SCALE * torch.rand(size, generator=random) ** 2
    residuals = [torch.zeros(size) for _ in meters]
    lowest: list[float] = []
    for turn in range(rounds):
        drift = torch.randn(size, generator=random)
        direction = 0.95 * direction + (1 - 0.95**2) ** 0.5 * drift
        for number, own in enumerate(meters):
            noise = private * torch.randn(size, generator=random)
            _, units = encode((scale * (direction + noise) + residuals[number]).int(), "top64x2")
            residuals[number] += scale * (direction + noise) - units
            own.record_own_part(0, units)
            own.record_own_tokens(TOKENS, 1.0)
            for other in meters:
                if other is not own:
                    other.record_update(f"volunteer {number}", [other.sample(0, units)], TOKENS)
        if turn >= 4:
            lowest.append(min(value for m in meters for value in m.agreements().values()))
            factors = [contribution_factors(meter.agreements()) for meter in meters]
            if remembers:
                assert all(set(each.values()) == {1.0} for each in factors)
    return lowest


def test_no_honest_machine_of_eight_is_doubted_for_sparse_updates():
    short, long = (agree_sparsely(24, remembers) for remembers in (False, True))
    assert min(long) > FULL_AGREEMENT
    assert min(long[10:]) > 1.1 * min(short[10:]), "more rounds in memory agree more"


def test_rounds_in_parts_are_judged_like_whole_ones():
    machines = Machines()
    for _ in range(6):
        for fragment, units in enumerate(machines.change()):
            machines.meter.record_own_part(fragment, units)
            machines.meter.record_own_tokens(TOKENS // len(SIZES), 1 / len(SIZES))
        machines.receive("ann", machines.change())
        machines.receive("eve", machines.change(0.001))
    assert machines.factors() == {"ann": 1.0, "eve": 0.0}


def test_machine_that_stops_contributing_counts_for_less_after_some_rounds():
    machines = Machines()
    machines.train({"eve": 30.0})
    assert machines.train({"eve": 0.01}, rounds=1)["eve"] > 0.0
    assert machines.train({"eve": 0.01}, rounds=20)["eve"] == 0.0


def test_honest_volunteer_that_leaves_is_forgotten_and_never_doubted():
    machines = Machines()
    machines.train({})
    for _ in range(3 * int(MAX_SILENT_ROUNDS)):
        machines.direction = [  # the training goes on, in other directions
            0.8 * direction + 0.6 * machines.noise(len(direction))
            for direction in machines.direction
        ]
        machines.train_own()
        machines.receive("ben", machines.change())
        assert machines.factors().get("ann", 1.0) > 0.0
    assert machines.meter.agreements().keys() == {"ben"}


def test_volunteer_is_not_judged_while_its_first_update_is_being_applied():
    """A model on the disk takes a while: at first only a part of the update is in the anchor."""
    machines = Machines()
    machines.train({})
    machines.receive("cleo", machines.change()[:1], TOKENS // len(SIZES))
    assert "cleo" not in machines.meter.agreements()
    machines.train({"cleo": 30.0}, rounds=1)
    machines.train_own()
    assert machines.factors()["cleo"] == 1.0


def test_number_of_volunteers_is_bounded():
    machines = Machines()
    machines.train_own(3)
    for number in range(2 * FEW):
        machines.receive(f"eve-{number}", [torch.zeros(SIZES[0]).int()], 1)
    for volunteer in ("ann", "ben"):
        machines.receive(volunteer, machines.change())
    machines.train_own()
    assert len(machines.meter.agreements()) <= FEW


@given(st.dictionaries(st.text(), st.floats(-1, 1)))
def test_factors_follow_agreement_and_spare_everybody_without_a_majority(agreements):
    factors = contribution_factors(agreements)
    agreeing = [name for name, value in agreements.items() if value >= FULL_AGREEMENT]
    if 2 * len(agreeing) < len(agreements):
        assert factors == {}
        return
    assert factors.keys() == agreements.keys()
    assert all(factors[name] == 1.0 for name in agreeing)
    for name, value in agreements.items():
        assert 0.0 <= factors[name] <= 1.0 and (value > NO_AGREEMENT or factors[name] == 0.0)


def test_useless_updates_of_a_stranger_take_no_weight(world, caplog):
    """Its updates are valid and state all tokens that its ticket permits; they contain noise."""
    machines = world.start_linked(1, 2, 3, 9)
    honest, stranger = machines[:3], machines[3]
    wait_until(lambda: honest[0].exchange.stats.peers == 3)

    def train_round(seed: int) -> None:
        for machine in honest:
            machine.publish_round(seed)  # all honest machines learn the same
        stranger.publish_round(1000 + seed, tokens=1 << 20)
        world.wait_for_agreement(*machines)

    for seed in range(4):
        train_round(seed)
    for machine in honest:
        # Next to so fast a machine only the stranger's claim could count.
        assert machine.exchange.compute_weight(1e6) > 0.95
        assert machine.exchange.stats.suspended == (), "the owner vouches for nobody"
    findings = [record.message for record in caplog.records if "does not agree" in record.message]
    assert len(findings) == 3, "each machine says so once"
    assert all(stranger.identity.key[:8] in finding for finding in findings)
