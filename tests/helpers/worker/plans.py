"""Plans and engines for the engine tests; `benchmarks/swap/bitwise.py` defines "the same bits"."""

import dataclasses
import hashlib
import importlib.util
import json
import sys
from collections.abc import Collection
from pathlib import Path

import torch
from helpers.paths import ROOT
from helpers.updates.headers import build_update
from hypothesis import strategies as st

from barnraise.ledger.anchor import Anchor, initial_weights
from barnraise.ledger.codec import decode, encode
from barnraise.planning.plan import REMOTE, DeviceShare, Plan
from barnraise.protocol.messages import FragmentUpdate
from barnraise.spec import ModelSpec, Recipe
from barnraise.swap.engine import Engine
from barnraise.swap.executor import EngineProgress
from barnraise.swap.state_store import FragmentSequence, StateStore

_PATH = ROOT / "benchmarks" / "swap" / "bitwise.py"
if (bitwise := sys.modules.get("bitwise")) is None:
    _spec = importlib.util.spec_from_file_location("bitwise", _PATH)
    bitwise = sys.modules["bitwise"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(bitwise)

groups = bitwise.group_blocks
resident = bitwise.resident_plan
from_disk = bitwise.plan_on_disk

TINY = ModelSpec(layers=2, width=32, heads=4, context=16, vocabulary=300)
RECIPE = Recipe(learning_rate=3e-3, clip=1.0)
KINDS = ["resident", "staged", "exact", "restart", "staged disk"]
FRAGMENT = FragmentUpdate(digest="0" * 64, size=1, sketch="0" * 16)


def tiny_plan(kind: str = "resident", model: ModelSpec = TINY, **more) -> Plan:
    """Return a plan of one of KINDS for a tiny model, with other fields replaced by `more`."""
    plan = dataclasses.replace(
        resident(model), sequences=8, slots=1, host_gradient_slots=model.layers
    )
    if kind == "staged":
        plan = dataclasses.replace(plan, staged=True)
    elif kind != "resident":
        plan = from_disk(plan, restart=kind == "restart", staged=kind == "staged disk", tile=4096)
    return dataclasses.replace(plan, **more)


def engine_of(plan: Plan, folder: Path | None = None, recipe: Recipe = RECIPE) -> Engine:
    """Return an engine on a fresh state, or on the one in the folder, with the plan's optimizer."""
    recipe = dataclasses.replace(recipe, optimizer=plan.optimizer)
    store = StateStore(plan, folder if plan.on_disk else None)
    anchor, fresh = FragmentSequence(store, "anchor"), store.header is None
    for fragment in plan.fragments if fresh else ():
        anchor[fragment.index] = initial_weights(fragment, 11)
    engine = Engine(
        plan,
        recipe,
        store,
        Anchor(anchor),
        describe=lambda progress: json.dumps(dataclasses.asdict(progress)),
        progress=None if fresh else EngineProgress(**json.loads(store.header)),
    )
    if fresh and plan.on_disk:
        engine.commit()
    return engine


def sample_text(sequences: int = 4, seed: int = 0, model: ModelSpec = TINY) -> torch.Tensor:
    """Return learnable text: each token is the last one plus one."""
    return bitwise.sample_text(model, sequences, seed)


def weights_of(engine: Engine) -> list[torch.Tensor]:
    """Return fp32 copies of the replica's fragments, with the pending update applied."""
    return bitwise.read_state(engine)[::3]


def exchange_state(engine: Engine, kind: str) -> list[torch.Tensor]:
    """Return copies of all fragments of "anchor", "momentum" or "feedback"."""
    engine.apply_queued()
    dtype = torch.float32 if kind == "momentum" else torch.int32
    return [tensor.clone() for tensor in FragmentSequence(engine.store, kind, dtype)]


def state_digest(engine: Engine) -> str:
    """Return one digest of the whole state: replica, moments, and what the exchange needs."""
    hasher = hashlib.blake2b()
    exchanged = [
        tensor
        for kind in ("anchor", "momentum", "feedback")
        for tensor in exchange_state(engine, kind)
    ]
    for tensor in bitwise.read_state(engine) + exchanged:
        hasher.update(tensor.numpy().tobytes())
    return hasher.hexdigest()


class FakeUpdate:
    """An update as the exchange delivers it."""

    def __init__(self, author: str, seq: int, payloads: list[bytes]) -> None:
        parts = [FRAGMENT] * len(payloads)
        self.header = build_update(author * 64, seq, tokens=64, fragments=parts)
        self.payloads = payloads

    def decode(self, index: int) -> torch.Tensor | None:
        """Return fragment `index`'s int32 units; None where the update has no part for it."""
        payload = self.payloads[index]
        return decode(payload, TINY.fragments()[index].size) if payload else None


def train_round(
    engine: Engine, author: str = "a", seq: int = 1, weight: float = 1.0, seed: int = 0
) -> FakeUpdate:
    """Train three steps, end the round, and return its update."""
    for step in range(3):
        engine.step([sample_text(seed=100 * seed + step)])
    update = FakeUpdate(author, seq, [part.payload for part in engine.end_round(encode, weight)])
    engine.anchor.record(update.header)
    return update


@st.composite
def arbitrary_plans(draw) -> Plan:
    """Draw any plan that a program can be compiled for."""
    layers = draw(st.integers(1, 12))
    cuts = st.integers(0, (1 << layers - 1) - 1)
    forward, backward = groups(layers, draw(cuts)), groups(layers, draw(cuts))[::-1]
    largest = max(len(group) for group in (*forward, *backward))
    staged, clipping = draw(st.booleans()), draw(st.sampled_from(["none", "exact", "layer"]))
    safety = draw(st.sampled_from(["round", "exact", "restart"]))
    gradients = draw(st.sampled_from(["host", "disk"])) if safety != "round" else "host"
    near = ["host", "device"] if staged else ["host"]
    tiers = st.sampled_from(near if safety == "round" else [*near, "disk"])
    ends = [draw(st.sampled_from(near)) for _ in range(2)]
    weights = (ends[0], *(draw(tiers) for _ in range(layers)), ends[1])
    spills = staged and clipping == "exact" and gradients == "disk"

    def moments_tier(i: int, tier: str) -> str:
        if safety == "round" or (staged and tier == "device"):
            return tier
        if staged and (tier == "disk" or (spills and 0 < i <= layers)):
            return "disk"
        return draw(st.sampled_from(["host", "disk"]))

    waits = staged and clipping == "exact" and gradients == "host"
    return Plan(
        model=ModelSpec(layers, width=16, heads=1, context=8, vocabulary=256),
        staged=staged,
        micro_batches=2,
        forward_groups=forward,
        backward_groups=backward,
        retained_blocks=draw(st.integers(0, layers)),
        clipping=clipping,
        weights=weights,
        moments=tuple(moments_tier(i, tier) for i, tier in enumerate(weights)),
        gradients=gradients,
        crash_safety=safety,
        slots=largest + draw(st.integers(0, 3)),
        host_slots=draw(st.integers(1, 3)),
        gradient_slots=largest + draw(st.integers(0, 2)),
        ring=draw(st.integers(1, 4)),
        tile=2048,
        host_gradient_slots=layers if waits else largest + draw(st.integers(0, 2)),
    )


def stage_of(plan: Plan, fragments: Collection[int]) -> Plan:
    """Return the plan of one machine of a crew, which holds some fragments of a whole plan's."""

    def restrict(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        local = [tuple(i for i in group if i in fragments) for group in groups]
        return tuple(group for group in local if group)

    weights, moments = (
        tuple(tier if i in fragments else REMOTE for i, tier in enumerate(tiers))
        for tiers in (plan.weights, plan.moments)
    )
    blocks = sum(0 < i < plan.last_fragment for i in fragments)
    return dataclasses.replace(
        plan,
        weights=weights,
        moments=moments,
        clipping="exact",
        forward_groups=restrict(plan.forward_groups),
        backward_groups=restrict(plan.backward_groups),
        retained_blocks=min(plan.retained_blocks, blocks),
    )


@st.composite
def stage_plans(draw) -> Plan:
    """Draw any plan of one machine of a crew: of a lead or of another member."""
    plan = draw(arbitrary_plans().filter(lambda plan: plan.clipping == "exact"))
    first = draw(st.integers(1, plan.model.layers))
    fragments = list(range(first, draw(st.integers(first, plan.model.layers)) + 1))
    if first == 1 and draw(st.booleans()):
        fragments = [0, *fragments, plan.last_fragment]
    return stage_of(plan, fragments)


@st.composite
def plans_of_several_devices(draw) -> Plan:
    """Draw any plan of two or three devices that a program can be compiled for."""
    plan = draw(arbitrary_plans().filter(lambda plan: plan.staged))
    count = draw(st.integers(2, 3))
    weights, moments = (
        tuple("host" if tier == "device" else tier for tier in tiers)
        for tiers in (plan.weights, plan.moments)
    )
    return dataclasses.replace(
        plan,
        weights=weights,
        moments=moments,
        micro_batches=count,
        devices=(DeviceShare("cpu", 1),) * count,
        host_gradient_slots=plan.model.layers,
    )
