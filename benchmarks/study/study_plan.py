"""Decide which trainings the study makes, in stages that depend on earlier results.

The first stages tune the inner learning rate of each kind and DiLoCo's outer parameters, so that
the baselines are tuned. The last one varies one factor of ours at a time, without predictions of
updates in flight, and makes the long trainings, with two seeds and with the settings of a new run.
All of it is 116 M tokens, so that two cores make it in the 75 minutes that the study may take.
Trainings outside the plan stay in the results and in the document. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from study_case import Case

from barnraise.exchange.weights.delay_compensation import STREAMED_FACTOR

SHORT_TOKENS = 1_024_000
LONG_TOKENS = 8_192_000
SPEEDS = (1.0, 2.0, 4.0, 7.0)
KINDS = ("ours", "parallel", "diloco", "alone")
RATES = (1e-3, 2e-3, 4e-3)
# DiLoCo's outer rates and momenta, those of its paper first.
DILOCO_OUTER = ((0.7, 0.9), (0.5, 0.8), (0.8, 0.7), (1.0, 0.5))
# The delay on a line with room. By the estimate for a new run, four machines that train 124 M
# parameters on a GPU of 12 GB at 64 sequences a step publish two bits every ten steps in 0.17 of a
# round on 100 Mb/s. (GPT-2's own batch of half a million tokens is 128 sequences of each of four.)
# At the 8 sequences that a new run has by default the same line is full, and at 64 sequences a
# faster GPU fills half of it. So short trainings have a full line, the default of `Case`.
ROOMY_LINE_DELAY = 0.17

# The names of two factors, which the plot of bytes draws.
ROUND_LENGTH = "round length H"
SCHEMES = "compression scheme"


class Results:
    """The results so far, by the key of their case."""

    def __init__(self, results: list[dict[str, Any]]) -> None:
        """Index results; of one case the last counts."""
        self.by_key: dict[str, dict[str, Any]] = {}
        for result in results:
            self.add(result)

    def add(self, result: dict[str, Any]) -> None:
        """Add a result."""
        self.by_key[Case.from_dict(result["case"]).key] = result

    def has(self, case: Case) -> bool:
        """Return whether a case is measured."""
        return case.key in self.by_key

    def get(self, case: Case) -> dict[str, Any] | None:
        """Return a case's result, or None if it is not measured."""
        return self.by_key.get(case.key)

    def loss(self, case: Case) -> float:
        """Return a case's final loss; infinity if it diverged.

        Raises:
            KeyError: if it is not measured.
        """
        return self.by_key[case.key]["loss"] or float("inf")

    def cases(self) -> list[Case]:
        """Return all measured cases."""
        return [Case.from_dict(result["case"]) for result in self.by_key.values()]

    def best(self, cases: list[Case]) -> Case:
        """Return the measured case with the least loss; the first case if none is measured."""
        measured = [case for case in cases if self.has(case)]
        return min(measured, key=self.loss) if measured else cases[0]


Stage = Callable[[Results], list[Case]]


@dataclass(frozen=True)
class StudyPlan:
    """The trainings of a study."""

    short: int = SHORT_TOKENS
    long: int = LONG_TOKENS
    rates_tried: tuple[float, ...] = RATES
    quick: bool = False  # one training of each kind only
    only_frontier: bool = False  # Compare ours with the baselines, and vary no single factor.

    def stages(self) -> list[Stage]:
        """Return the stages; each gives its cases when all earlier ones are measured."""
        if self.quick:
            return [self.quick_cases]
        return [self.rate_cases, self.outer_cases, self.remaining_cases]

    # ---- tuning -------------------------------------------------------------------------------

    def rate_cases(self, _results: Results) -> list[Case]:
        """Return short trainings of each kind with each inner rate."""
        return [case for kind in KINDS for case in self.rate_cases_of(kind)]

    def rate_cases_of(self, kind: str) -> list[Case]:
        """Return the short trainings of a kind with each inner rate."""
        return [Case(kind=kind, tokens=self.short, rate=rate) for rate in self.rates_tried]

    def outer_cases(self, results: Results) -> list[Case]:
        """Return further tuning around the best rates.

        These are twice the highest rate for each kind that did best with it, and DiLoCo's outer
        parameters at its best inner rate.
        """
        best = [results.best(self.rate_cases_of(kind)) for kind in KINDS]
        higher = [
            replace(case, rate=2 * case.rate) for case in best if case.rate == max(self.rates_tried)
        ]
        diloco = results.best(self.rate_cases_of("diloco"))
        outer = [replace(diloco, outer_rate=eta, momentum=mu) for eta, mu in DILOCO_OUTER]
        return higher + outer

    def tuned(self, results: Results, kind: str, **changes: Any) -> Case:
        """Return the best of a kind's short trainings, with some settings changed."""
        outer = [case for case in self.outer_cases(results) if case.kind == kind]
        return replace(results.best(self.rate_cases_of(kind) + outer), **changes)

    # ---- one factor of ours at a time ---------------------------------------------------------

    def factors(self, results: Results) -> dict[str, list[Case]]:
        """Return the cases of each factor, the reference first."""
        if self.only_frontier:
            return {}
        base = self.tuned(results, "ours")
        sparse = replace(base, form="top64x2")
        sparse_lengths = (("top256x2", (5, 10, 20, 40, 76)), ("top64x2", (5, 10, 20, 40)))
        uneven = replace(base, speeds=SPEEDS)
        at_once = replace(base, streamed=False, guess="momentum")

        def vary(reference: Case, name: str, *values: Any) -> list[Case]:
            return [replace(reference, **{name: value}) for value in values]

        half_trust = replace(base, guess="momentum", trust=STREAMED_FACTOR)
        return {
            ROUND_LENGTH: [base, *vary(base, "steps", 5, 20, 40)],
            SCHEMES: [base, *vary(base, "form", "dense8", "dense4", "top256x2", "top64x2")],
            "the residual in the replica": [
                base,
                replace(base, residual_in_replica=True),
                *(
                    replace(base, form=form, steps=steps, residual_in_replica=True)
                    for form, lengths in sparse_lengths
                    for steps in lengths
                ),
            ],
            "the same bytes per token": [base, replace(base, form="dense4", steps=20)],
            "decay of the error feedback": [sparse, replace(sparse, decay=0.95)],
            "outer optimizer": [
                base,
                *vary(base, "outer_rate", 0.4, 0.8),
                *vary(base, "momentum", 0.5, 0.8),
                replace(base, momentum_end=0.2),
            ],
            "delay": [base, *vary(base, "delay", 0.0, ROOMY_LINE_DELAY, 1.6)],
            "streaming, and rounds by each machine's own clock": [
                base,
                at_once,
                replace(at_once, windows=False),
                replace(at_once, fold="round", guess="none"),
            ],
            "predictions, with streaming": [
                base,
                *vary(base, "guess", "own", "last", "momentum"),
                half_trust,
            ],
            "predictions, without streaming": [at_once, replace(at_once, guess="none", trust=1.0)],
            "speeds, weights and the schedule's clock": [
                base,
                uneven,
                replace(uneven, weights="even"),
                replace(uneven, clock="ledger"),
            ],
            "replicas": [base, *vary(base, "replicas", 1, 2, 8)],
            "late joiners": [base, replace(base, joins=(0.0, 0.0, 0.25, 0.5))],
        }

    @staticmethod
    def flatten(factors: dict[str, list[Case]]) -> list[Case]:
        """Return all factors' cases, each once."""
        return list(dict.fromkeys(case for cases in factors.values() for case in cases))

    # ---- the long trainings -------------------------------------------------------------------

    def long_case(self, results: Results, kind: str) -> Case:
        """Return the long training of a kind with the best settings of its short ones.

        Ours has the prediction that a new run has with streaming, on a line with room.
        """
        changes: dict[str, Any] = {"tokens": self.long}
        if kind == "ours":
            changes |= {
                "guess": "momentum",
                "trust": STREAMED_FACTOR,
                "delay": ROOMY_LINE_DELAY,
            }
        return self.tuned(results, kind, **changes)

    def undelayed_case(self, results: Results) -> Case:
        """Return ours where nothing is late, and nothing is predicted."""
        return self.tuned(results, "ours", tokens=self.long, delay=0.0)

    def full_line_case(self, results: Results) -> Case:
        """Return ours on a full line, which was trained outside the plan, with two seeds."""
        return replace(self.long_case(results, "ours"), delay=Case.delay)

    def frontier(self, results: Results) -> list[Case]:
        """Return the long trainings with seed 0, the most important first."""
        ours, *baselines = (self.long_case(results, kind) for kind in KINDS)
        uneven = replace(ours, speeds=SPEEDS)
        return [ours, *baselines, self.undelayed_case(results), uneven]

    def second_seed(self, results: Results) -> list[Case]:
        """Return the long trainings with seed 1."""
        kinds = ("ours", "parallel", "diloco")
        return [replace(self.long_case(results, kind), seed=1) for kind in kinds]

    def remaining_cases(self, results: Results) -> list[Case]:
        """Return what follows the tuning.

        The long trainings come first, so that no core is left with one of them at the end.
        """
        long_cases = [*self.frontier(results), *self.second_seed(results)]
        return [*long_cases, *self.flatten(self.factors(results))]

    def quick_cases(self, results: Results) -> list[Case]:
        """Return one training of each kind, which shows little but that all of it runs."""
        ours = self.long_case(results, "ours")
        sparse = replace(ours, form="top64x2", residual_in_replica=True)
        return [*self.frontier(results), sparse]
