"""Plans for a GPU, one of each kind, and a life of the engine under them on a fake card."""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from helpers.cuda.card_damages import DAMAGES
from helpers.cuda.fake_cuda import Card, Copy, fake_cuda, in_fresh_thread
from helpers.cuda.race_detector import RaceDetector
from helpers.worker.plans import bitwise

from barnraise.models.functions import FUNCTIONS
from barnraise.models.weights import views
from barnraise.planning.plan import DeviceShare, Plan, tile_elements
from barnraise.spec import MAX_PROMPTS, ModelSpec, Recipe, preset
from barnraise.swap.engine import Engine
from barnraise.swap.sampler import SamplingSettings, TokenRange
from barnraise.swap.state_store import StateStore

GPT2 = FUNCTIONS["gpt2"]


def card_plan(
    model: ModelSpec | None = None,
    resident: int = 0,
    group: int = 1,
    clipping: str = "exact",
    **changes,
) -> Plan:
    """Return a plan for a GPU with the state in RAM.

    Args:
        model: the model; by default two layers of GPT-2 124M.
        resident: fragments with their state on the card: the ends, then the top blocks.
        group: blocks per kept input.
        clipping: "none", "exact" or "layer".
        **changes: other fields.
    """
    model = model or replace(preset("gpt2-124m"), layers=2)
    layers, last = model.layers, model.layers + 1
    forward = tuple(
        tuple(range(first, min(first + group, last))) for first in range(1, last, group)
    )
    on_card = set([0, last, *range(layers, 0, -1)][:resident])
    tiers = tuple("device" if i in on_card else "host" for i in range(layers + 2))
    paged = layers - len(on_card - {0, last})
    plan = Plan(
        model=model,
        device="cuda",
        threads=1,
        dtype="bfloat16",
        staged=True,
        sequences=1,
        micro_batches=2,
        forward_groups=forward,
        backward_groups=forward[::-1],
        kept_inputs="block" if group == 1 else "group",
        weights=tiers,
        moments=tiers,
        clipping=clipping,
        slots=min(2 * group + 1, paged),
        gradient_slots=group + 1,
        host_gradient_slots=layers if clipping == "exact" else group + 2,
        ring=0,
        tile=tile_elements(model, whole=True),
    )
    return replace(plan, **changes)


def on_two_cards(plan: Plan, second: int = 1) -> Plan:
    """Return the plan on two cards; the second takes so many of the micro-batches."""
    first = plan.micro_batches - second
    return replace(plan, devices=(DeviceShare("cuda", first), DeviceShare("cuda:1", second)))


def on_disk(plan: Plan, weights: str = "disk", crash_safety: str = "exact", **changes) -> Plan:
    """Return the plan with its state on disk, but for what lies on the card."""
    blocks = [weights if tier == "host" else tier for tier in plan.weights[1:-1]]
    plan = replace(
        plan,
        weights=(plan.weights[0], *blocks, plan.weights[-1]),
        moments=tuple("device" if tier == "device" else "disk" for tier in plan.weights),
        exchange="disk",
        gradients="disk",
        crash_safety=crash_safety,
        ring=4,
        host_gradient_slots=plan.gradient_slots + 1,
        tile=tile_elements(plan.model, whole=False),
    )
    return replace(plan, **changes)


class AllOnes:
    """An update of another author: one unit everywhere."""

    header = object()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def decode(self, index: int) -> torch.Tensor:
        """Return fragment `index`'s int32 units."""
        return torch.ones(self.plan.fragments[index].size, dtype=torch.int32)


@dataclass
class Phase:
    """What the card counted during one part of a life."""

    peak: int
    peaks: Counter[int]
    peak_place: str
    waits: list[str]
    copies: list[Copy]
    launches: int
    unaligned: list[str]


@dataclass
class Life:
    """What the card counted during a life of the engine."""

    static: int = 0
    left: int = 0  # bytes on the card after the engine was closed
    pinned: int = 0
    mixes: list[str] = field(default_factory=list)
    phases: dict[str, Phase] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Return the most bytes alive on the card."""
        return max(phase.peak for phase in self.phases.values())

    def peak_of(self, card: int) -> int:
        """Return the most bytes alive on one of several cards."""
        return max(phase.peaks[card] for phase in self.phases.values())

    @property
    def highest(self) -> str:
        """Say where the card held most, and how much each phase took."""
        name = max(self.phases, key=lambda phase: self.phases[phase].peak)
        peaks = {phase: counts.peak for phase, counts in self.phases.items()}
        return f"{name}, {self.phases[name].peak_place}; {peaks}"


def open_on_card(plan: Plan, folder: Path | None) -> Engine:
    """Return an engine on the fake card of the calling thread."""
    store = StateStore(plan, folder if plan.on_disk else None)
    recipe = Recipe(optimizer=plan.optimizer)
    return Engine(plan, recipe, store, bitwise.HeaderRecorder(), lambda progress: "header")


def batches_of(plan: Plan) -> list[torch.Tensor]:
    """Return the micro-batches of a step."""
    shape = plan.sequences, plan.model.context + 1
    return [torch.zeros(shape, dtype=torch.int64) for _ in range(plan.micro_batches)]


def live_through(plan: Plan, folder: Path | None = None, **card_options) -> Life:
    """Return what a fake card counts while an engine does all that a worker asks of it."""
    return in_fresh_thread(lambda: _live(plan, folder, Card(**card_options)))


def _live(plan: Plan, folder: Path | None, card: Card) -> Life:
    life = Life()
    with fake_cuda(card):
        engine = open_on_card(plan, folder)
        life.static = card.allocated
        for name, act in _acts(engine, plan).items():
            card.reset()
            act()
            engine.executor.drain()
            life.phases[name] = _phase_of(card)
        life.pinned = card.runtime.largest
        life.mixes = card.mixes
        engine.close()
        life.left = card.allocated
    return life


def _phase_of(card: Card) -> Phase:
    launches = sum(card.launches.values())
    return Phase(
        card.peak, card.peaks, card.peak_place, card.waits, card.copies, launches, card.unaligned
    )


def _acts(engine: Engine, plan: Plan) -> dict[str, Callable[[], object]]:
    """Return what a worker asks of an engine, in order."""
    ahead = (0.5,) * len(plan.fragments)

    def step() -> None:
        engine.step(batches_of(plan))

    def queue_and_step() -> None:
        engine.queue_updates(AllOnes(plan), prediction=ahead)
        step()

    def apply_queued() -> None:
        engine.queue_updates(AllOnes(plan))
        engine.apply_queued()

    def end_round() -> None:
        for part in engine.end_round(lambda units: (b"", units.clone()), 1.0):
            del part

    def save_and_load() -> None:
        if plan.on_disk:
            engine.commit(closing=True)
        else:
            engine.load_state_dict(engine.state_dict())

    def write_samples() -> None:
        prompts = [[1] * 200] * MAX_PROMPTS
        words = TokenRange(plan.model.vocabulary, 0)
        for _ in engine.generate(prompts, SamplingSettings(2, temperature=0.0), words):
            pass

    def resync() -> None:
        engine.replace_fragment(1, torch.ones(plan.fragments[1].size, dtype=torch.int32))
        engine.reset_momentum()
        engine.reset_feedback()

    return {
        "first step": step,
        "step": step,
        "step with arrivals": queue_and_step,
        "apply arrivals": apply_queued,
        "end round": end_round,
        "evaluate": lambda: engine.evaluate(
            [torch.zeros(4, plan.model.context + 1, dtype=torch.int64)]
        ),
        "write samples": write_samples,
        "save and load": save_and_load,
        "resync": resync,
        "last step": step,
    }


def count_launches(plan: Plan) -> int:
    """Return the kernels that one step launches."""

    def count() -> int:
        with fake_cuda(Card()) as card:
            engine = open_on_card(plan, None)
            engine.step(batches_of(plan))
            card.reset()
            engine.step(batches_of(plan))
            engine.executor.drain()
            launches = sum(card.launches.values())
            engine.close()
        return launches

    return in_fresh_thread(count)


def launches_per_block(model: ModelSpec, dtype: str) -> int:
    """Return the kernels for one more block and one more micro-batch: those of a step's core."""

    def count(layers: int, micro_batches: int) -> int:
        plan = card_plan(replace(model, layers=layers), micro_batches=micro_batches, dtype=dtype)
        return count_launches(plan)

    return count(3, 2) - count(2, 2) - count(3, 1) + count(2, 1)


def plain_launches(model: ModelSpec, dtype: str) -> int:
    """Return the kernels of one block and micro-batch in torch alone, with recomputation."""

    def count() -> int:
        with fake_cuda(Card()) as card:
            fragment = model.fragments()[1]
            flat = torch.zeros(fragment.size, device="cuda")
            weights = {name: view.requires_grad_() for name, view in views(fragment, flat).items()}
            for weight in weights.values():
                weight.grad = torch.zeros_like(weight)
            x = torch.zeros(1, model.context, model.width, device="cuda", requires_grad=True)
            card.reset()
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16"):
                with torch.no_grad():
                    GPT2.block(weights, x, model)
                y = GPT2.block(weights, x, model)
            y.backward(torch.zeros_like(y))
            return sum(card.launches.values())

    return in_fresh_thread(count)


def find_races(plan: Plan, folder: Path, behind: bool = False, damage: str = "") -> Counter[str]:
    """Return the races in a short life of the engine, with one of `DAMAGES` done to it."""

    def find() -> Counter[str]:
        detector = RaceDetector(behind)
        with DAMAGES.get(damage, contextlib.nullcontext)(), fake_cuda(detector):
            engine = open_on_card(plan, folder)
            acts = _acts(engine, plan)
            for name in RACING if not damage else RACING[:2]:
                acts[name]()
            engine.flush()
            engine.executor.drain()
            engine.close()
        assert detector.checked > 1000
        return detector.races

    return in_fresh_thread(find)


# What a worker does during a round. Between rounds all lanes are idle.
RACING = ("first step", "step", "step with arrivals", "end round", "evaluate", "last step")
