"""Decide which trainings compare Muon with AdamW, each tuned over as many cells. Pure.

One machine alone tunes the inner rates; four machines on a full line then vary the outer optimizer
and the steps of a round with the best of them, and data parallelism has
the same optimizer.
With BARNRAISE_STUDY=medium, 4 M parameters, fewer settings are compared over fewer steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from study_case import Case
from study_model import SIZE, STEP_TOKENS
from study_plan import Results

from barnraise.exchange.weights.delay_compensation import STREAMED_FACTOR
from barnraise.spec import ADAMW, MUON, OPTIMIZERS

STEPS = 1_000  # of each machine
QUICK_STEPS = 60
TOKENS_PER_PARAMETER = 20  # of the longest trainings
FEWER = (0.25, 0.5)  # parts of the steps, for the steps to equal loss
MACHINES = (4, 8)
ROUND_STEPS = (10, 30)
OUTER = ((0.6, 0.7), (0.8, 0.5), (0.7, 0.6))  # η and μ
SEEDS = (0, 1, 2)
# Beyond the corner of the first nine, at which the best of these lies.
MORE_RATES = ((8e-3, 2.5e-3), (1.6e-2, 2.5e-3), (1.6e-2, 5e-3))
# Twelve cells of each optimizer: the rate of what AdamW trains, and one or two more settings.
INNER: dict[str, list[dict[str, Any]]] = {
    MUON: [
        {"rate": rate, "matrix_rate": matrix_rate}
        for rate, matrix_rate in (*product((2e-3, 4e-3, 8e-3), (5e-3, 1e-2, 2e-2)), *MORE_RATES)
    ],
    ADAMW: [
        {"rate": rate, "beta2": beta2, "weight_decay": decay}
        for rate in (1e-3, 2e-3, 3e-3, 4e-3)
        for beta2, decay in ((0.95, 0.1), (0.99, 0.1), (0.95, 0.03))
    ],
}
# The same of the medium model.
MEDIUM_STEPS = 250
MEDIUM_INNER: dict[str, list[dict[str, Any]]] = {
    MUON: [
        {"rate": rate, "matrix_rate": matrix_rate}
        for rate, matrix_rate in ((4e-3, 5e-3), (8e-3, 5e-3), (8e-3, 2.5e-3))
    ],
    ADAMW: [{"rate": rate} for rate in (5e-4, 1e-3, 2e-3, 3e-3)],
}
PARALLEL_FACTORS = (1, 2, 4)  # of the best rates of one machine, for data parallelism
# Tried for four machines that exchange updates as well as the best settings of one.
FOUR_INNER: dict[str, list[dict[str, Any]]] = {
    MUON: [
        {"rate": rate, "matrix_rate": matrix_rate}
        for rate, matrix_rate in ((2e-3, 5e-3), (4e-3, 5e-3), (4e-3, 1e-2))
    ],
    ADAMW: [{}, {"beta2": 0.99}, {"rate": 3e-3}],
}


@dataclass(frozen=True)
class MuonPlan:
    """The trainings that compare both optimizers.

    Attributes:
        steps: of each machine.
        is_medium: whether the model is the medium one.
    """

    steps: int = STEPS
    is_medium: bool = False

    def tuning(self, optimizer: str) -> list[Case]:
        """Return one machine alone with each setting of an optimizer."""
        inner = MEDIUM_INNER if self.is_medium else INNER
        return [self._alone(optimizer, settings) for settings in inner[optimizer]]

    def best(self, results: Results, optimizer: str) -> Case:
        """Return the best of these that is measured."""
        return results.best(self.tuning(optimizer))

    def longer_and_shorter(self, results: Results, optimizer: str) -> list[Case]:
        """Return one machine alone with the best settings, for fewer and twice as many steps."""
        best = self.best(results, optimizer)
        return [replace(best, tokens=int(best.tokens * factor)) for factor in (*FEWER, 2)]

    def parallel(self, results: Results, optimizer: str) -> list[Case]:
        """Return data parallelism of four machines, with multiples of the best rates."""
        best = self.best(results, optimizer)
        return [_scale_rates(replace(best, kind="parallel"), f) for f in PARALLEL_FACTORS]

    def outer(self, results: Results, optimizer: str) -> list[Case]:
        """Return four machines on a full line: tune the exchange and the rates."""
        best = self.best(results, optimizer)
        others = [self._alone(optimizer, settings) for settings in FOUR_INNER[optimizer]]
        return [
            *(self._exchange(each, MACHINES[0], ROUND_STEPS[0], OUTER[0]) for each in others),
            *(
                self._exchange(best, MACHINES[0], steps, outer)
                for steps, outer in product(ROUND_STEPS, OUTER)
            ),
        ]

    def most_machines(self, results: Results, optimizer: str) -> Case:
        """Return eight machines with the best outer settings of four."""
        best = self.best_outer(results, optimizer)
        return replace(best, replicas=MACHINES[1], tokens=MACHINES[1] * self.steps * STEP_TOKENS)

    def best_outer(self, results: Results, optimizer: str) -> Case:
        """Return the best of four machines that is measured."""
        return results.best(self.outer(results, optimizer))

    def fewer_steps(self, results: Results) -> list[Case]:
        """Return the best of four machines with Muon for fewer steps."""
        best = self.best_outer(results, MUON)
        return [replace(best, tokens=int(best.tokens * factor)) for factor in FEWER]

    # ---- stages ----

    def tune(self, _results: Results) -> list[Case]:
        """Return the tuning of both optimizers."""
        return [case for optimizer in OPTIMIZERS for case in self.tuning(optimizer)]

    def compare(self, results: Results) -> list[Case]:
        """Return what follows the tuning, with one seed and short rounds."""
        return [
            case
            for optimizer in OPTIMIZERS
            for case in (
                *self.longer_and_shorter(results, optimizer),
                *self.parallel(results, optimizer),
                *self.outer(results, optimizer),
            )
            if case.steps == ROUND_STEPS[0]
        ]

    def compare_four(self, results: Results) -> list[Case]:
        """Return four machines with the best settings of one."""
        return [
            self._exchange(self.best(results, optimizer), MACHINES[0], ROUND_STEPS[0], OUTER[0])
            for optimizer in OPTIMIZERS
        ]

    def repeat(self, results: Results) -> list[Case]:
        """Return the best of each kind with every seed, but for the most machines."""
        repeated = [case for case in self._compared(results) if case.replicas == MACHINES[0]]
        return [*self.fewer_steps(results), *repeated]

    def extend(self, results: Results) -> list[Case]:
        """Return what takes longest: the most machines, long trainings and long rounds."""
        most = [case for case in self._compared(results) if case.replicas == MACHINES[1]]
        rounds = [case for optimizer in OPTIMIZERS for case in self.outer(results, optimizer)]
        first = [case for case in most if case.seed == SEEDS[0]]
        return [*first, *self.longest(results), *most, *rounds]

    def longest(self, results: Results) -> list[Case]:
        """Return four machines with Muon and its data parallelism, for many tokens a parameter."""
        best = [self.best_outer(results, MUON), results.best(self.parallel(results, MUON))]
        steps = round(TOKENS_PER_PARAMETER * SIZE / (MACHINES[0] * STEP_TOKENS))
        return [replace(case, tokens=MACHINES[0] * steps * STEP_TOKENS) for case in best]

    def _compared(self, results: Results) -> Iterator[Case]:
        for seed, optimizer in product(SEEDS, OPTIMIZERS):
            for case in self.rows(results, optimizer):
                yield replace(case, seed=seed)

    def rows(self, results: Results, optimizer: str) -> list[Case]:
        """Return one machine, four, eight, and data parallelism of four, each with its best."""
        return [
            self.best(results, optimizer),
            self.best_outer(results, optimizer),
            self.most_machines(results, optimizer),
            results.best(self.parallel(results, optimizer)),
        ]

    def quick(self, _results: Results) -> list[Case]:
        """Return two short trainings, which show that both optimizers run."""
        return [self._alone(optimizer, INNER[optimizer][4]) for optimizer in OPTIMIZERS]

    def _alone(self, optimizer: str, settings: dict[str, Any]) -> Case:
        tokens = Case.replicas * self.steps * STEP_TOKENS  # one of four machines' shares
        return Case(kind="alone", optimizer=optimizer, tokens=tokens, **settings)

    def _exchange(
        self, inner: Case, machines: int, round_steps: int, outer: tuple[float, float]
    ) -> Case:
        return replace(
            inner,
            kind="ours",
            replicas=machines,
            tokens=machines * self.steps * STEP_TOKENS,
            steps=round_steps,
            outer_rate=outer[0],
            momentum=outer[1],
            guess="momentum",
            trust=STREAMED_FACTOR,
        )


def _scale_rates(case: Case, factor: float) -> Case:
    matrix_rate = None if case.matrix_rate is None else factor * case.matrix_rate
    return replace(case, rate=factor * case.rate, matrix_rate=matrix_rate)
