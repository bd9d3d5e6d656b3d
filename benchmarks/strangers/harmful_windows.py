"""Windows of the strangers' drill in which machines judge strangers, and no person acts.

Two machines whose volunteers the owner has invited train alone, then each time among strangers:
idle accounts that state tokens, and such that publish multiples of honest updates. What is compared
is losses at equal tokens, so that several windows run side by side.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean
from typing import Any

from drill_machine import DrillMachine
from judged_rounds import count_honest_suspended
from loss_curve import Curve, loss_at, mean_loss, read_curve

from barnraise.protocol.enums import Activity, Standing

HONEST = ("ada", "bob")
# Name → the attack of the strangers, and for each of them the factor for honest updates. The first
# one is a newcomer that behaves until its updates count; the others have tickets of a time when
# nobody could vouch for newcomers.
HARMFUL = {
    "one of three": ("sleeping copies", (-3.0,)),
    "three of five": ("harmful copies", (-1.0, -1.0, -1.0)),
    "one that is weak": ("harmful copies", (-0.5,)),
}
LANES = 2  # windows that run side by side
IDLE_ACCOUNTS = 3
IDLE_SPEED = 20  # honest machines' tokens that the ticket of an idle account permits
QUIET_SHARE = 0.15  # of a window's tokens that the honest train before strangers come
OTHERS = 5_000  # honest updates after which strangers should be suspended
# Strangers spoil one or two rounds of the honest, whose tokens are lost. In a shorter training the
# same harm is a larger gap, in a longer one a smaller one.
LIMIT_TOKENS = 1_300_000
SIMULATED_ROUNDS = {"dense4": 5_000, "top64x2": 5_000}  # of honest machines
MIN_HONEST_SHARE = 0.9
# Of one training of that length: the mean of six, 0.010, and two of their standard deviations.
MAX_END_GAP = 0.035
MAX_ROUNDS = 5
END_SHARE = 0.2  # of the tokens, over which the losses at the end are compared
END_POINTS = 8


@dataclass(frozen=True)
class HarmResult:
    """What strangers did to a training."""

    peak_gap: float
    end_gap: float
    rounds: float  # of an honest machine, from the strangers' first update to their suspension


class HarmfulWindows:
    """The windows, and what was not reached.

    Attributes:
        names: Of the kinds of harmful strangers.
        shortfalls: What was not reached.
    """

    def __init__(
        self, make_swarm: Callable[..., Any], rate: int, tokens: int, references: int
    ) -> None:
        """Prepare the windows.

        Args:
            make_swarm: Returns a swarm, see `drill_strangers.StrangersDrill`.
            rate: Tokens per second that a site's ticket allows here.
            tokens: Honest tokens of each training.
            references: How many trainings have no strangers.
        """
        self._make_swarm = make_swarm
        self._rate = rate
        self._tokens = tokens
        self._references = references
        self._progress = tokens / LIMIT_TOKENS
        self.names = [*HARMFUL]
        self.shortfalls: list[str] = []

    def run(self) -> dict[str, Any]:
        """Run all windows; return the fields of the drill's last line."""
        lanes = ThreadPoolExecutor(LANES)
        try:
            budget = lanes.submit(self._spend_budget)
            quiet = [
                lanes.submit(self._train, f"quiet {number}", "", ())
                for number in range(self._references)
            ]
            attacked = {name: lanes.submit(self._train, name, *HARMFUL[name]) for name in HARMFUL}
            suspended = sum(
                count_honest_suspended(rounds, scheme, 0.7)
                for scheme, rounds in SIMULATED_ROUNDS.items()
            )
            share, counted = budget.result()
            reference = [curve for future in quiet for curve in future.result()[0]]
            results = {
                name: measure_harm(name, reference, *future.result())
                for name, future in attacked.items()
            }
        finally:  # the windows end with the drill's processes
            lanes.shutdown(wait=False, cancel_futures=True)
        fields: dict[str, Any] = {
            "honest_share_of_budget": round(share, 3),
            "newcomers_counted": counted,
            "harmful_peak_gap": round(max(result.peak_gap for result in results.values()), 3),
            "harmful_end_gap": round(max(result.end_gap for result in results.values()), 4),
            "rounds_to_suspension": round(max(result.rounds for result in results.values()), 1),
            "honest_suspended": suspended,
            "harmful": {name: vars(result) for name, result in results.items()},
        }
        self._require(share >= MIN_HONEST_SHARE, f"honest_share_of_budget ≥ {MIN_HONEST_SHARE}")
        for name, result in results.items():
            most = MAX_END_GAP / self._progress
            self._require(result.end_gap <= most, f"{name}: end gap ≤ {most:.3f}")
            self._require(result.rounds <= MAX_ROUNDS, f"{name}: suspended in {MAX_ROUNDS} rounds")
        self._require(suspended == 0, "honest_suspended is 0")
        self._require(counted == 0, "no update of a harmful newcomer counts")
        return fields

    def _require(self, reached: bool, value: str) -> None:
        if not reached:
            self.shortfalls.append(value)

    # ---- the windows

    def _spend_budget(self) -> tuple[float, int]:
        """Let idle accounts state all that their tickets allow, and a newcomer harm at once.

        Returns:
            The honest share of the budget, and how many newcomers' updates count anywhere.
        """
        budget = self._tokens
        swarm = self._make_swarm("idle", HONEST, budget, standing=Standing.INVITED)
        swarm.start()
        swarm.wait_until(lambda: swarm.count_updates() > 0, "the first update")
        attacks = [
            swarm.start_attack("idle accounts", f"idle{number}", IDLE_SPEED * self._rate)
            for number in range(IDLE_ACCOUNTS)
        ]
        newcomer = swarm.start_attack("harmful newcomers", "newcomer", 4 * self._rate, "-3.0")
        swarm.wait_until(lambda: any(map(has_finished, swarm.machines)), "the end of the budget")
        honest = swarm.honest_tokens()
        keys = {attack.keys[0] for attack in attacks}
        counted = 0
        for machine in swarm.machines:
            with machine.open_ledger() as ledger:
                authors = {author.partition(".")[0] for author in ledger.volunteers}
            counted += len(authors & {*newcomer.keys})
        came = keys & authors
        published = newcomer.record["counts"].get("published", 0)
        self._require(published > 0, "the newcomer published")
        self._require(came == keys, "the idle accounts stated tokens")
        for attack in (*attacks, newcomer):
            swarm.end_attack(attack)
        self._stop(swarm)
        return min(1.0, honest / budget), counted

    def _train(
        self, name: str, attack_name: str, factors: tuple[float, ...]
    ) -> tuple[Sequence[Curve], float]:
        """Train among strangers that make an attack with these factors.

        Returns:
            The loss of each machine, and after how many rounds the strangers were suspended.
        """
        folder = f"harmful {name}".replace(" ", "-")
        swarm = self._make_swarm(folder, HONEST, standing=Standing.INVITED)
        swarm.start()
        first = int(QUIET_SHARE * self._tokens)
        swarm.wait_until(lambda: swarm.honest_tokens() >= first, "tokens without strangers")
        attacks = [
            swarm.start_attack(attack_name, f"{folder}{number}", 4 * self._rate, str(factor))
            for number, factor in enumerate(factors)
        ]
        watch = SuspensionWatch(swarm.machines, [attack.keys[0] for attack in attacks])
        swarm.wait_until(watch.are_all_suspended, "the suspension of the strangers", OTHERS)
        swarm.wait_until(lambda: swarm.honest_tokens() >= self._tokens, "the whole training")
        for attack in attacks:
            swarm.end_attack(attack)
        curves = [read_curve(m.state_dir.path / "evaluations", swarm.keys) for m in swarm.machines]
        self._stop(swarm)
        return curves, watch.rounds

    def _stop(self, swarm: Any) -> None:
        for machine in swarm.machines:
            machine.leave()
        swarm.samples.stop()


def measure_harm(
    name: str, reference: Sequence[Curve], attacked: Sequence[Curve], rounds: float
) -> HarmResult:
    """Compare a training among strangers with the one without them."""
    last = min(curve[-1][0] for curve in (*reference, *attacked))
    positions = sorted({tokens for curve in attacked for tokens, _ in curve if tokens <= last})
    peak = max(
        loss_at(curve, at) / mean_loss(reference, at) - 1 for curve in attacked for at in positions
    )
    ends = [last * (1 - END_SHARE * n / END_POINTS) for n in range(END_POINTS)]
    end = mean(mean_loss(attacked, at) / mean_loss(reference, at) - 1 for at in ends)
    result = HarmResult(peak, end, rounds)
    print(f"    {name}: {result}", flush=True)
    return result


def count_rounds(machines: Sequence[DrillMachine]) -> float:
    """Return the rounds that a machine has published, in the mean of some."""
    return mean(machine.count_published()[1] for machine in machines)


def has_finished(machine: DrillMachine) -> bool:
    """Return whether a machine sees the budget spent."""
    return machine.status.get("activity") in (Activity.FINISHING, Activity.FINISHED)


class SuspensionWatch:
    """After how many rounds each stranger's updates are withheld.

    Attributes:
        rounds: The most, from a stranger's first update in any ledger on.
    """

    def __init__(self, machines: Sequence[DrillMachine], keys: Sequence[str]) -> None:
        """Watch the strangers with these keys."""
        self._machines = machines
        self._keys = keys
        self._began: dict[str, float] = {}  # key → the honest rounds when its first update came
        self._suspended: set[str] = set()
        self.rounds = 0.0

    def are_all_suspended(self) -> bool:
        """Look at the ledgers of all machines."""
        published = count_rounds(self._machines)
        seen: set[str] = set()
        suspended = set(self._keys)
        for machine in self._machines:
            with machine.open_ledger() as ledger:
                authors = {
                    author.partition(".")[0]: volunteer
                    for author, volunteer in ledger.volunteers.items()
                }
                seen |= authors.keys()
                suspended &= {key for key in authors if authors[key] in ledger.verdicts.suspended}
        for key in seen & {*self._keys}:
            self._began.setdefault(key, published)
        for key in suspended - self._suspended:
            self._suspended.add(key)
            self.rounds = max(self.rounds, published - self._began[key])
        return len(self._suspended) == len(self._keys)
