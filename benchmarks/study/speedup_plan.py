"""Decide which trainings show how much sooner a run ends with more machines. Pure.

A line is described by the rounds of all values in two bits that it carries in the whole run, which
do not depend on the model's size (`line_rounds`). So the study's toy stands for a larger model: its
line carries as many rounds, and the worker's own ladder chooses length and compression.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from line_rounds import line_rounds
from muon_plan import QUICK_STEPS as MUON_QUICK_STEPS
from muon_plan import MuonPlan
from study_case import Case
from study_model import SIZE, STEP_TOKENS
from study_plan import Results, Stage

from barnraise.exchange.weights.delay_compensation import STREAMED_FACTOR
from barnraise.planning.compression_ladder import LONG_ROUNDS
from barnraise.planning.lines import LINES, Line
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.planning.round_limits import PLAIN_ROUNDS
from barnraise.planning.round_schedule import RoundSchedule, fit_to_uplink
from barnraise.planning.update_header import TYPICAL_HEADER_BYTES
from barnraise.planning.uplink_budget import UPDATE_SHARE

MACHINES = (2, 4, 8)
LENGTHS = (1_000, 2_000)  # steps of each machine
QUICK_STEPS = 150
ALONE_LENGTHS = (500, 1_000, 2_000, 4_000, 8_000)  # of one machine alone
RATES = (2e-3, 3e-3)  # One machine alone is tuned over these.
RATE = 2e-3  # of several machines
SEEDS = (0, 1, 2)
OUTER_RATE_TRIED = 0.8  # of the most machines, instead of 0.6
STUDIED_LINES = LINES[:2]
TOKENS_PER_PARAMETER = 20  # of the runs that the lines stand for
TOKENS_PER_SECOND = 24_000  # of each of their machines: 124 M parameters on a gaming GPU
# Steps of a round, by compression scheme, of four machines on a full line.
GRID_LENGTHS = {"dense2": (860, 344, 166, 60, 20), "top64x2": (100, 40, 20, 10)}
GRID_MACHINES, GRID_STEPS = 4, 2_000
# The same of the mini model, from the many rounds of all values that the ladder prefers down; one
# value in 64 has nine times as many at the same bytes, as far as there are steps.
LIMIT_LENGTHS = {"dense2": (5, 10, 20, 40), "top64x2": (1, 2, 5)}
DENSE = QuantizationScheme.parse("dense2")


@dataclass(frozen=True)
class Cell:
    """Machines on alike lines, and the steps of each."""

    machines: int
    line: Line
    steps: int

    @property
    def schedule(self) -> RoundSchedule:
        """Return the rounds that the worker's ladder chooses. A step takes one second."""
        update_rate = UPDATE_SHARE * self.line_bytes / (self.machines - 1)
        return fit_to_uplink(update_rate, 1.0, SIZE, run_steps=self.steps)

    @property
    def line_bytes(self) -> float:
        """Return the bytes that the toy's line carries during a step."""
        rounds = line_rounds(
            self.line,
            self.machines,
            TOKENS_PER_SECOND,
            TOKENS_PER_PARAMETER,
            DENSE.bits_per_parameter / 8,
        )
        sent = (self.machines - 1) * (DENSE.payload_size(SIZE) + TYPICAL_HEADER_BYTES)
        return sent * rounds / self.steps / UPDATE_SHARE

    def case(self, seed: int = 0) -> Case:
        """Return the training."""
        schedule = self.schedule
        size = schedule.scheme.payload_size(SIZE) + TYPICAL_HEADER_BYTES
        sending = (self.machines - 1) * size / self.line_bytes
        return make_case(
            self.machines, self.steps, schedule, min(1.0, sending / schedule.steps), seed
        )


def make_case(
    machines: int, steps: int, schedule: RoundSchedule, delay: float, seed: int = 0
) -> Case:
    """Return the training of machines with a schedule, with a new run's settings."""
    return Case(
        tokens=machines * steps * STEP_TOKENS,
        seed=seed,
        replicas=machines,
        rate=RATE,
        steps=schedule.steps,
        form=str(schedule.scheme),
        residual_in_replica=schedule.carries_residual,
        plain_rounds=PLAIN_ROUNDS if schedule.is_long else 0,
        delay=round(delay, 4),
        guess="momentum",
        trust=STREAMED_FACTOR,
    )


def alone_case(steps: int, rate: float = RATE, seed: int = 0) -> Case:
    """Return the training of one machine alone; by the study's custom it has a quarter's share."""
    return Case(kind="alone", tokens=4 * steps * STEP_TOKENS, rate=rate, seed=seed)


def grid_case(form: str, length: int) -> Case:
    """Return four machines on a full line with rounds of so many steps; sparse ones carry."""
    scheme = QuantizationScheme.parse(form)
    is_long = length >= LONG_ROUNDS.min_steps
    schedule = RoundSchedule(length, scheme, carries_residual=not scheme.dense, is_long=is_long)
    return make_case(GRID_MACHINES, GRID_STEPS, schedule, Case.delay)


@dataclass(frozen=True)
class SpeedupPlan:
    """The trainings of this study: one seed of everything first, then further seeds."""

    quick: bool = False

    def cells(self) -> Iterator[Cell]:
        """Yield the machines on lines whose speed-ups are stated."""
        for steps in (QUICK_STEPS,) if self.quick else LENGTHS:
            for machines in MACHINES:
                for line in STUDIED_LINES:
                    yield Cell(machines, line, steps)

    def stages(self) -> list[Stage]:
        """Return the stages; each gives its cases when all earlier ones are measured."""
        if self.quick:
            return [self.quick_cases]
        muon = [self.muon.tune, self.muon.compare, self.muon.repeat, self.muon.extend]
        return [self.first_seed, self.further_seeds, *muon]

    @property
    def muon(self) -> MuonPlan:
        """Return the trainings that compare Muon with AdamW."""
        return MuonPlan(MUON_QUICK_STEPS) if self.quick else MuonPlan()

    def first_seed(self, _results: Results) -> list[Case]:
        """Return one machine alone, all cells and the grid, with seed 0."""
        alone = [alone_case(steps) for steps in ALONE_LENGTHS]
        tuned = [alone_case(steps, rate) for rate in RATES[1:] for steps in ALONE_LENGTHS[:3]]
        grid = [grid_case(form, h) for form, lengths in GRID_LENGTHS.items() for h in lengths]
        return [*alone, *(cell.case() for cell in self.cells()), *grid, *tuned]

    def further_seeds(self, _results: Results) -> list[Case]:
        """Return one machine alone and all cells with the other seeds.

        The first line comes before the others, and what trains few tokens before what trains many.
        """
        alone = [alone_case(steps) for steps in ALONE_LENGTHS]
        lines = [
            [cell.case() for cell in self.cells() if cell.line == line] for line in STUDIED_LINES
        ]
        cases: list[Case] = []
        for line in (alone + lines[0], *lines[1:]):
            line.sort(key=lambda case: case.tokens / (case.replicas if case.kind == "alone" else 1))
            cases += [replace(case, seed=seed) for case in line for seed in SEEDS[1:]]
        return cases + self.higher_outer_rate()

    def higher_outer_rate(self) -> list[Case]:
        """Return the most machines with another outer rate, with every seed."""
        case = Cell(MACHINES[-1], STUDIED_LINES[0], LENGTHS[0]).case()
        return [replace(case, outer_rate=OUTER_RATE_TRIED, seed=seed) for seed in SEEDS]

    def limit_cases(self, _results: Results) -> list[Case]:
        """Return the trainings of the mini model."""
        return [grid_case(form, h) for form, lengths in LIMIT_LENGTHS.items() for h in lengths]

    def quick_cases(self, _results: Results) -> list[Case]:
        """Return ten short trainings, which show little but that all of it runs."""
        alone = [alone_case(steps) for steps in (QUICK_STEPS, 4 * QUICK_STEPS)]
        return [*alone, *(cell.case() for cell in self.cells()), *self.muon.quick(_results)]
