"""Which trainings the study makes, in stages: a later one takes what an earlier one found.

First the inner rate of each kind and the outer ones of DiLoCo, so that what ours is held against is tuned. Then ours,
one factor at a time, without a guess of what is under way. Then the frontier, long, with two seeds: as a new run is.
All of it is 116 M tokens, so that two cores make it in the 75 minutes that the study may take; what was trained
besides stays in the results, and in the document.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from study_case import Case

from barnraise.exchange.pacing.delay_compensation import STREAMED_FACTOR

SHORT, LONG = 1_024_000, 8_192_000  # tokens
SPEEDS = (1.0, 2.0, 4.0, 7.0)
KINDS = ("ours", "parallel", "diloco", "alone")
RATES = (1e-3, 2e-3, 4e-3)
# A line with room: four machines that train 124 M parameters on a GPU of 12 GB at 64 sequences a step say two bits
# every ten steps in 0.17 of a round on 100 Mb/s, as the estimate of a new run reckons (GPT-2's own batch of half a
# million tokens is 128 sequences of each of four). At the 8 sequences that a new run has by default the same line is
# full, and at 64 sequences a faster GPU fills half of it: so short trainings have a full line, Case's own.
AFFORDED = 0.17


class Results:
    """What has been measured: a case's key → its line."""

    def __init__(self, lines: list[dict]):
        self.by_key = {Case.read(line["case"]).key: line for line in lines}

    def add(self, line: dict) -> None:
        self.by_key[Case.read(line["case"]).key] = line

    def has(self, case: Case) -> bool:
        return case.key in self.by_key

    def loss(self, case: Case) -> float:
        """Infinite for what diverged. Raises KeyError for what is not measured."""
        return self.by_key[case.key]["loss"] or float("inf")

    def cases(self) -> list[Case]:
        return [Case.read(line["case"]) for line in self.by_key.values()]

    def line(self, case: Case) -> dict | None:
        return self.by_key.get(case.key)

    def best(self, cases: list[Case]) -> Case:
        """Of those that are measured; the first when none is."""
        measured = [case for case in cases if self.has(case)]
        return min(measured, key=self.loss) if measured else cases[0]


@dataclass(frozen=True)
class Plan:
    short: int = SHORT
    long: int = LONG
    rates_tried: tuple[float, ...] = RATES
    quick: bool = False
    compared: bool = False  # with what ours is held against, and no factor by itself

    def stages(self) -> list[Callable[[Results], list[Case]]]:
        if self.quick:
            return [self.quickly]
        return [self.rates, self.around, self.rest]

    # ---- tuning what ours is held against

    def rates(self, found: Results) -> list[Case]:
        return [
            Case(kind=kind, tokens=self.short, rate=rate)
            for kind in KINDS
            for rate in self.rates_tried
        ]

    def of(self, found: Results, kind: str) -> list[Case]:
        return [case for case in self.rates(found) if case.kind == kind]

    def around(self, found: Results) -> list[Case]:
        """Twice the highest rate of each kind that did best with it; DiLoCo's own rate and momentum, the paper's first,
        at its best inner rate."""
        best = [found.best(self.of(found, kind)) for kind in KINDS]
        pairs = [(0.7, 0.9), (0.5, 0.8), (0.8, 0.7), (1.0, 0.5)]
        diloco = found.best(self.of(found, "diloco"))
        outer = [replace(diloco, outer_rate=eta, momentum=mu) for eta, mu in pairs]
        return [
            replace(case, rate=2 * case.rate) for case in best if case.rate == max(self.rates_tried)
        ] + outer

    def tuned(self, found: Results, kind: str, **more) -> Case:
        """The best of a kind's short trainings, with some things changed."""
        around = [case for case in self.around(found) if case.kind == kind]
        return replace(found.best(self.of(found, kind) + around), **more)

    # ---- ours, one factor at a time

    def factors(self, found: Results) -> dict[str, list[Case]]:
        """Factor → its cases, the unchanged one first."""
        if self.compared:
            return {}
        base = self.tuned(found, "ours")
        thin, uneven = replace(base, form="top64x2"), replace(base, speeds=SPEEDS)
        windows = replace(base, streamed=False, guess="momentum")
        return {
            "H": [base, *(replace(base, steps=steps) for steps in (5, 20, 40))],
            "bits and density": [
                base, *(replace(base, form=form) for form in ("dense8", "dense4", "top256x2", "top64x2")),
            ],
            "the same bytes a token": [base, replace(base, form="dense4", steps=20)],
            "decay": [thin, replace(thin, decay=0.95)],
            "outer": [
                base, *(replace(base, outer_rate=eta) for eta in (0.4, 0.8)),
                *(replace(base, momentum=mu) for mu in (0.5, 0.8)), replace(base, momentum_end=0.2),
            ],
            "delay": [base, *(replace(base, delay=delay) for delay in (0.0, AFFORDED, 1.6))],
            "windows, and each in its own time": [
                base, windows, replace(windows, windows=False), replace(windows, fold="round", guess="none"),
            ],
            "guess, in turns": [
                base, *(replace(base, guess=guess) for guess in ("own", "last", "momentum")),
                replace(base, guess="momentum", trust=STREAMED_FACTOR),
            ],
            "guess, in windows": [windows, replace(windows, guess="none", trust=1.0)],
            "speeds, weights and clock": [
                base, uneven, replace(uneven, weights="even"), replace(uneven, clock="ledger"),
            ],
            "replicas": [base, *(replace(base, replicas=r) for r in (1, 2, 8))],
            "joiners": [base, replace(base, joins=(0.0, 0.0, 0.25, 0.5))],
            "optimizer": [base, replace(base, optimizer="muon")],
        }  # fmt: skip

    @staticmethod
    def flat(factors: dict[str, list[Case]]) -> list[Case]:
        return list(dict.fromkeys(case for cases in factors.values() for case in cases))

    # ---- the frontier

    def far(self, found: Results, kind: str) -> Case:
        """The long training of a kind, with what served its short ones best; ours with the guess that a new run makes
        in turns, on a line with room."""
        ours = (
            dict(guess="momentum", trust=STREAMED_FACTOR, delay=AFFORDED) if kind == "ours" else {}
        )
        return self.tuned(found, kind, tokens=self.long, **ours)

    def rest(self, found: Results) -> list[Case]:
        """What follows from the tuning, the long ones first: so that no core is left with one of them in the end."""
        return [*self.frontier(found), *self.again(found), *self.flat(self.factors(found))]

    def at_once(self, found: Results) -> Case:
        """Ours where nothing is late, and nothing guessed."""
        return self.tuned(found, "ours", tokens=self.long, delay=0.0)

    def full(self, found: Results) -> Case:
        """Ours on a line that is full: trained besides, two seeds; short trainings have such a line all."""
        return replace(self.far(found, "ours"), delay=Case.delay)

    def frontier(self, found: Results) -> list[Case]:
        """Seed 0: what counts most first."""
        ours, *others = (self.far(found, kind) for kind in KINDS)
        return [ours, *others, self.at_once(found), replace(ours, speeds=SPEEDS)]

    def again(self, found: Results) -> list[Case]:
        """Seed 1 of what is compared."""
        return [replace(self.far(found, kind), seed=1) for kind in ("ours", "parallel", "diloco")]

    # ---- a few minutes

    def quickly(self, found: Results) -> list[Case]:
        """One training of each kind: shows that all of it runs, and little else."""
        return [*self.frontier(found), replace(self.far(found, "ours"), form="top64x2")]
