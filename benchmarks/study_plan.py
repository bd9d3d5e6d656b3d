"""Which trainings the study makes, in stages: a later one takes what an earlier one found.

First the inner rate of each kind and the outer ones of DiLoCo, so that what ours is held against is tuned. Then ours,
one factor at a time. Then the frontier, long, with two seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from study_case import Case

SHORT, LONG = 1_024_000, 8_192_000  # tokens
SPEEDS = (1.0, 2.0, 4.0, 7.0)
KINDS = ("ours", "parallel", "diloco", "alone")
RATES = (1e-3, 2e-3, 4e-3)
OURS = Case()  # what the sweep turns around, but for the inner rate
# A line with room: four machines that train 124 M parameters on a GPU of 12 GB at 64 sequences a step say two bits
# every ten steps in 0.17 of a round on 100 Mb/s, as the estimate of a new run reckons. At the 8 sequences that a new
# run has by default the same line is full, and at 64 sequences a faster GPU fills half of it.
AFFORDED = 0.17
# What the sweep and the frontier turn around, but for the inner rate. A new run says that in turns: `Plan.said`.
CHOSEN = Case(form="dense2", steps=10, guess="momentum")


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
    quick: bool = False

    def stages(self) -> list[Callable[[Results], list[Case]]]:
        if self.quick:
            return [self.quickly]
        return [self.rates, self.wider, self.outer, lambda found: self.flat(self.factors(found)), self.far, self.again]

    # ---- tuning what ours is held against

    def rates(self, found: Results) -> list[Case]:
        return [replace(OURS, kind=kind, tokens=self.short, rate=rate) for kind in KINDS for rate in RATES]

    def wider(self, found: Results) -> list[Case]:
        """Twice the highest rate of each kind that did best with it."""
        kinds = [[case for case in self.rates(found) if case.kind == kind] for kind in KINDS]
        best = [found.best(cases) for cases in kinds]
        return [replace(case, rate=2 * case.rate) for case in best if case.rate == max(RATES)]

    def tuned(self, found: Results, kind: str, **more) -> Case:
        """The best of a kind's short trainings so far, with some things changed."""
        cases = [case for case in self.rates(found) + self.wider(found) if case.kind == kind]
        if kind == "diloco":
            cases += self.outer(found)
        return replace(found.best(cases), **more)

    def outer(self, found: Results) -> list[Case]:
        """DiLoCo's own rate and momentum: the paper's, the pilot's, and around them."""
        rate = found.best([c for c in self.rates(found) + self.wider(found) if c.kind == "diloco"]).rate
        pairs = [(0.7, 0.9), (0.8, 0.7), (1.0, 0.5), (1.0, 0.0)]
        base = Case(kind="diloco", tokens=self.short, rate=rate)
        return [replace(base, outer_rate=eta, momentum=mu) for eta, mu in pairs]

    # ---- ours, one factor at a time

    def factors(self, found: Results) -> dict[str, list[Case]]:
        """Factor → its cases, the unchanged one first: what is said, how late and how guessed around the plainest
        form; then the rest around what was chosen by that."""
        base = self.tuned(found, "ours")
        near = self.chosen(found, tokens=self.short)
        thin, uneven = replace(near, form="top64x2"), replace(near, speeds=SPEEDS)
        forms = ("dense8", "dense2", "top256x4", "top256x2", "top64x2")
        return {
            "form": [base, *(replace(base, form=form) for form in forms)],
            "H": [base, *(replace(base, steps=steps) for steps in (5, 10, 40))],
            "the same bytes a token": [
                base, replace(base, form="dense8", steps=40), replace(base, form="dense2", steps=10),
                replace(base, form="top512x2", steps=9),
            ],
            "delay": [base, *(replace(base, delay=delay) for delay in (0.0, 1.6))],
            "guess": [
                base, *(replace(base, guess=guess) for guess in ("none", "last", "momentum")),
                *(replace(base, trust=trust) for trust in (0.3, 0.6)),
                *(replace(base, guess="momentum", trust=trust) for trust in (0.6, 0.8)),
                replace(base, guess="momentum", trust=0.6, momentum=0.3), replace(base, guess="momentum", momentum=0.7),
            ],
            "guess, by the chosen": [
                near, replace(near, guess="none"), replace(near, trust=0.8), replace(near, guess="own", trust=0.6),
                replace(near, guess="own"), replace(near, guess="none", fold="round"),
            ],
            "said in turns": [
                near, *(self.in_turns(near, momentum=mu) for mu in (0.5, 0.3, 0.7)),
                self.in_turns(near, guess="momentum"),
            ],
            "said, by the chosen": [near, replace(near, form="dense4"), replace(near, steps=5)],
            "windows and clock": [near, replace(near, windows=False), replace(near, clock="ledger")],
            "outer": [
                near, *(replace(near, momentum=mu) for mu in (0.0, 0.3, 0.7)),
                *(replace(near, outer_rate=eta) for eta in (0.6, 1.0)), replace(near, momentum=0.7, momentum_end=0.2),
            ],
            "decay": [thin, replace(thin, decay=0.95), replace(thin, momentum=0.0)],
            "speeds": [near, uneven, replace(uneven, weights="even"), replace(uneven, windows=False)],
            "replicas": [replace(near, replicas=r) for r in (1, 2, 4, 8)],
            "joiners": [near, replace(near, joins=(0.0, 0.0, 0.25, 0.5))],
            "optimizer": [near, replace(near, optimizer="muon")],
        }  # fmt: skip

    @staticmethod
    def flat(factors: dict[str, list[Case]]) -> list[Case]:
        return list(dict.fromkeys(case for cases in factors.values() for case in cases))

    # ---- the frontier

    def chosen(self, found: Results, **more) -> Case:
        return replace(CHOSEN, **{"rate": self.tuned(found, "ours").rate, "tokens": self.long, **more})

    def against(self, found: Results, kind: str) -> Case:
        """A long training of what ours is held against, with rounds as long as ours."""
        return self.tuned(found, kind, tokens=self.long, **({"steps": CHOSEN.steps} if kind == "diloco" else {}))

    def far(self, found: Results) -> list[Case]:
        """Seed 0: what counts most first. Data parallel at a lower rate too, as a long training may want it."""
        ours = self.chosen(found)
        parallel, diloco, alone = (self.against(found, kind) for kind in ("parallel", "diloco", "alone"))
        more = [replace(ours, delay=0.0), replace(ours, speeds=SPEEDS), replace(ours, form="top64x2")]
        more += [self.afforded(found), replace(self.afforded(found), momentum=0.7), replace(ours, momentum=0.7)]
        more += [replace(self.afforded(found), momentum=0.7, steps=5, delay=2 * AFFORDED)]
        more += [self.in_step(found), self.in_time(found)]
        said = self.said(found)
        more += [said, replace(said, momentum=0.7), replace(said, guess="momentum"), replace(said, speeds=SPEEDS)]
        more += [replace(said, delay=AFFORDED), replace(said, delay=AFFORDED, momentum=0.7)]
        return [ours, diloco, parallel, replace(parallel, rate=parallel.rate / 2), alone, *more]

    @staticmethod
    def in_turns(case: Case, **more) -> Case:
        """As the worker does it: each block's round ends when the line comes to it, and nothing is guessed."""
        return replace(case, **{"streamed": True, "guess": "none", **more})

    def said(self, found: Results) -> Case:
        """Ours as a new run has it, on a line that is full."""
        return self.in_turns(self.best_far(found, "ours"))

    def afforded(self, found: Results) -> Case:
        """Ours in windows where the line is not filled: what a gaming GPU on 100 Mb/s comes to."""
        return replace(self.best_far(found, "ours"), delay=AFFORDED)

    def in_step(self, found: Results) -> Case:
        """Ours as DiLoCo is: no update is late, and its momentum. What is left is the codec and the sum."""
        diloco = self.best_far(found, "diloco")
        return replace(self.best_far(found, "ours"), delay=0.0, momentum=diloco.momentum, outer_rate=diloco.outer_rate)

    def in_time(self, found: Results) -> Case:
        """DiLoCo with the tokens that it comes to while ours trains `long`: on the same lines it stands still in each
        round for as long as an update is under way."""
        diloco = self.best_far(found, "diloco")
        return replace(diloco, tokens=int(self.long / (1 + CHOSEN.delay)))

    def again(self, found: Results) -> list[Case]:
        """Seed 1 of what the figures are made of."""
        of = [self.said(found), *(self.best_far(found, kind) for kind in ("ours", "diloco", "parallel"))]
        return [replace(case, seed=1) for case in of]

    def best_far(self, found: Results, kind: str) -> Case:
        """The long training of a kind, with the rate that served it best."""
        case = self.chosen(found) if kind == "ours" else self.against(found, kind)
        return found.best([case, replace(case, rate=case.rate / 2)])

    # ---- a few minutes

    def quickly(self, found: Results) -> list[Case]:
        """One training of each kind: shows that all of it runs, and little else."""
        ours = self.chosen(found)
        others = [self.best_far(found, kind) for kind in ("diloco", "parallel", "alone")]
        more = [replace(ours, delay=0.0), replace(ours, speeds=SPEEDS), replace(ours, form="top64x2")]
        return [ours, self.said(found), *others, *more]
