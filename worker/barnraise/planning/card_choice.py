"""Choose among a machine's cards: one of them, or several over one host copy. Pure.

Each choice is planned as if the machine had those cards only, and the fastest one is taken. Cards
join in the order of their speed alone: one that slows the others down ends the list of those that
pay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from barnraise.errors import PlanError
from barnraise.formats import format_share
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.spec import ADAMW, ModelSpec

TAKEN = "taken"


@dataclass(frozen=True)
class PricedChoice:
    """One way to use a machine's cards.

    Attributes:
        cards: the cards by name, as people read them.
        tokens_per_second: predicted; 0 if the model does not fit.
        verdict: "taken", or why it is not.
    """

    cards: str
    tokens_per_second: float
    verdict: str


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
        return [f"{each.cards}: {each.verdict}" for each in self.choices if each.verdict != TAKEN]


def choose_cards(
    hardware: Hardware,
    model: ModelSpec,
    limits: Limits | None = None,
    step_sequences: int = 8,
    advise: bool = True,
    optimizer: str = ADAMW,
) -> CardChoice:
    """Find the fastest plan among those on one card and on several.

    Raises:
        PlanError: the model fits in no way; the sentence is about the card that fits it best.
    """
    options: dict[str, Any] = dict(
        limits=limits, step_sequences=step_sequences, optimizer=optimizer
    )
    if hardware.device == "cpu" and (limits is None or limits.device_memory is None):
        hardware = replace(hardware, others=())  # only windows of the RAM can be several
    if not hardware.others:
        plan = make_plan(hardware, model, advise=advise, **options)
        return CardChoice(plan, hardware, ())
    priced = [(card, _price(card, model, options)) for card in hardware.cards]
    priced.sort(key=lambda way: -_speed(way[1]))
    ranked = [card for card, _ in priced]
    for count in range(2, min(len(ranked), step_sequences) + 1):
        several = replace(ranked[0], others=tuple(ranked[1:count]))
        priced.append((several, _price(several, model, options)))
    chosen, plan = max(priced, key=lambda way: _speed(way[1]))
    if isinstance(plan, PlanError):
        plan = make_plan(ranked[0], model, advise=advise, **options)  # raises it with advice
    choices = tuple(_describe(machine, way, plan) for machine, way in priced)
    return CardChoice(plan, chosen, choices)


def _price(hardware: Hardware, model: ModelSpec, options: dict[str, Any]) -> Plan | PlanError:
    try:
        return make_plan(hardware, model, advise=False, **options)
    except PlanError as error:
        return error


def _speed(way: Plan | PlanError) -> float:
    return 0.0 if isinstance(way, PlanError) else way.tokens_per_second


def _describe(machine: Hardware, way: Plan | PlanError, taken: Plan) -> PricedChoice:
    name = name_cards((machine, *machine.others))
    if not machine.others:
        name = f"{name} alone ({machine.device_name})"
    if isinstance(way, PlanError):
        return PricedChoice(name, 0.0, str(way))
    if way is taken:
        return PricedChoice(name, way.tokens_per_second, TAKEN)
    slower = 1 - way.tokens_per_second / taken.tokens_per_second
    return PricedChoice(
        name, way.tokens_per_second, f"{format_share(slower)} slower, limited by {way.bottleneck}"
    )


def name_cards(cards: Sequence[Hardware]) -> str:
    """Name cards for people, like "2 × NVIDIA GeForce RTX 4090 and NVIDIA GeForce RTX 3060"."""
    names = [card.name for card in cards]
    parts = [
        f"{names.count(name)} × {name}" if names.count(name) > 1 else name
        for name in dict.fromkeys(names)
    ]
    return " and ".join(parts)
