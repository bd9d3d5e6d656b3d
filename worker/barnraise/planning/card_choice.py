"""Choose how a machine's cards train: one of them, several over one host copy, or as ranks. Pure.

Each choice is planned as if the machine had those cards only, and the fastest one is taken. Cards
join in the order of their speed alone: one that slows the others down ends the list of those that
pay. Ranks on GPUs are priced, but only the owner chooses them: NCCL has not been measured yet.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from barnraise.errors import PlanError
from barnraise.formats import format_share
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan
from barnraise.planning.rank_plans import plan_ranks
from barnraise.planning.search import make_plan
from barnraise.spec import ADAMW, ModelSpec

TAKEN = "taken"
SWAP, SHARDED = "swap", "sharded"
TENSORS = (1, 2)  # ranks that split each block, where the owner leaves the choice
NO_RANKS = (
    "the sharded engine shares a model among several GPUs, and there is one: leave out --engine "
    "sharded (`barnraise limits --engine auto` if it is saved), or start a cluster with torchrun"
)
UNMEASURED = "not chosen without --engine sharded: NCCL, which it needs, has not been measured yet"


@dataclass(frozen=True)
class PricedChoice:
    """One way to use a machine's cards.

    Attributes:
        cards: the cards by name, as people read them.
        tokens_per_second: predicted; 0 if the model does not fit.
        verdict: "taken", or why it is not.
        engine: "swap", "sharded", or "sharded, tensor 2".
    """

    cards: str
    tokens_per_second: float
    verdict: str
    engine: str = SWAP


@dataclass(frozen=True)
class CardChoice:
    """The choice among all ways to use a machine's cards.

    Attributes:
        plan: the fastest plan.
        hardware: the machine with the cards of that plan.
        choices: all ways that were priced.
    """

    plan: Plan
    hardware: Hardware
    choices: tuple[PricedChoice, ...]

    @property
    def refused(self) -> list[str]:
        """Return, for each choice that was not taken, the reason."""
        return [
            f"{each.cards} ({each.engine}): {each.verdict}"
            for each in self.choices
            if each.verdict != TAKEN
        ]


@dataclass(frozen=True)
class _Way:
    """One way to use cards, and the plan for it or why there is none."""

    hardware: Hardware
    result: Plan | PlanError
    engine: str = SWAP

    @property
    def speed(self) -> float:
        """Return the predicted tokens a second; 0 without a plan."""
        return 0.0 if isinstance(self.result, PlanError) else self.result.tokens_per_second

    def describe(self, taken: "_Way") -> PricedChoice:
        """Return it for people, with why it is not the way that is taken."""
        cards = (self.hardware, *self.hardware.others)
        name = name_cards(cards)
        if len(cards) == 1:
            name = f"{name} alone ({self.hardware.device_name})"
        if isinstance(self.result, PlanError):
            return PricedChoice(name, 0.0, str(self.result), self.engine)
        verdict = TAKEN
        if self is not taken:
            slower = 1 - self.speed / taken.speed
            verdict = f"{format_share(slower)} slower, limited by {self.result.bottleneck}"
        return PricedChoice(name, self.speed, verdict, self.engine)


def choose_cards(
    hardware: Hardware,
    model: ModelSpec,
    limits: Limits | None = None,
    step_sequences: int = 8,
    advise: bool = True,
    optimizer: str = ADAMW,
) -> CardChoice:
    """Find the fastest plan among those on one card and on several, or of ranks if chosen.

    Raises:
        PlanError: the model fits in no way; the sentence is about the card that fits it best.
    """
    limits = limits or Limits()
    options: dict[str, Any] = dict(
        limits=limits, step_sequences=step_sequences, optimizer=optimizer
    )
    if limits.engine == SHARDED:
        return _choose_sharded(hardware, model, options)
    if hardware.device == "cpu" and limits.device_memory is None:
        hardware = replace(hardware, others=())  # only windows of the RAM can be several
    if not hardware.others:
        plan = make_plan(hardware, model, advise=advise, **options)
        return CardChoice(plan, hardware, ())
    quietly = partial(_price, make_plan, advise=False, **options)
    ways = [_Way(card, quietly(card, model)) for card in hardware.cards]
    ways.sort(key=lambda way: -way.speed)
    ranked = [way.hardware for way in ways]
    several = [
        replace(ranked[0], others=tuple(ranked[1:count])) for count in range(2, len(ranked) + 1)
    ]
    for cards in several[: step_sequences - 1]:
        ways.append(_Way(cards, quietly(cards, model)))
    taken = max(ways, key=lambda way: way.speed)
    if isinstance(taken.result, PlanError):
        plan = make_plan(ranked[0], model, advise=advise, **options)  # raises it with advice
        taken = _Way(ranked[0], plan)
    assert isinstance(taken.result, Plan)
    choices = [way.describe(taken) for way in ways]
    # Ranks on cards need NCCL, which is there on Linux only.
    if limits.engine != SWAP and hardware.device == "cuda" and sys.platform == "linux":
        for way in _price_ranks(several, model, options):
            priced = way.describe(taken)
            choices.append(replace(priced, verdict=UNMEASURED) if way.speed else priced)
    return CardChoice(taken.result, taken.hardware, tuple(choices))


def _choose_sharded(hardware: Hardware, model: ModelSpec, options: dict[str, Any]) -> CardChoice:
    """Find the fastest plan in which all cards are ranks.

    Raises:
        PlanError: there is none.
    """
    if not hardware.others:
        raise PlanError(NO_RANKS)
    ways = _price_ranks([hardware], model, options)
    taken = max(ways, key=lambda way: way.speed)
    if isinstance(taken.result, PlanError):
        raise taken.result
    return CardChoice(taken.result, hardware, tuple(way.describe(taken) for way in ways))


def _price_ranks(
    machines: Sequence[Hardware], model: ModelSpec, options: dict[str, Any]
) -> list[_Way]:
    """Price ranks that split no block, and those that do, each on the cards that suit them best."""
    tensor = options["limits"].tensor
    ways: list[_Way] = []
    for split in (tensor,) if tensor else TENSORS:
        engine = SHARDED if split == 1 else f"{SHARDED}, tensor {split}"
        of_split = [
            _Way(cards, _price(plan_ranks, cards, model, tensor=split, **options), engine)
            for cards in machines
        ]
        # Of refusals the one of most cards counts: they need least each.
        ways.append(max(reversed(of_split), key=lambda way: way.speed))
    return ways


def _price(plan: Callable[..., Plan], *arguments: Any, **options: Any) -> Plan | PlanError:
    """Return the plan that a planner finds, or why it finds none."""
    try:
        return plan(*arguments, **options)
    except PlanError as error:
        return error


def name_cards(cards: Sequence[Hardware]) -> str:
    """Name cards for people, like "2 × NVIDIA GeForce RTX 4090 and NVIDIA GeForce RTX 3060"."""
    names = [card.name for card in cards]
    parts = [
        f"{names.count(name)} × {name}" if names.count(name) > 1 else name
        for name in dict.fromkeys(names)
    ]
    return " and ".join(parts)
