"""Train a tiny GPT alone: measure this machine, plan a step for it, and let the engine execute it.

    python examples/train_alone.py [STEPS]

Prints the loss in nats a byte, which falls from 5.5 to some 2.5 on the source of Python's library.
"""

import itertools
import sys
import tempfile
from pathlib import Path

import torch

from barnraise.ledger.anchor import Anchor, initial_weights
from barnraise.planning.search import make_plan
from barnraise.spec import ModelSpec, Recipe
from barnraise.swap.engine import Engine
from barnraise.swap.hardware_probe import probe
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.text.stdlib_text import read_stdlib

MODEL = ModelSpec(layers=2, width=64, heads=4, context=64, vocabulary=256)


def train(steps: int, folder: Path) -> Engine:
    """Train on bytes, and return the engine; the folder stores what was measured."""
    plan = make_plan(probe(folder, "cpu", cache=folder / "hardware.json"), MODEL)
    store = StateStore(plan)
    weights = FragmentSequence(store, "anchor")
    for fragment in plan.fragments:
        weights[fragment.index] = initial_weights(fragment, seed=1)
    engine = Engine(plan, Recipe(learning_rate=3e-3), store, Anchor(weights))
    text = torch.tensor(bytearray(b"".join(itertools.islice(read_stdlib(), 100)))).long()
    windows = text.unfold(0, MODEL.context + 1, MODEL.context)
    for step in range(steps):
        chosen = torch.randint(len(windows), (plan.micro_batches, plan.sequences))
        stats = engine.step(list(windows[chosen]))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4}: loss {stats.loss:.3f}, {stats.seconds * 1000:.0f} ms")
    return engine


if __name__ == "__main__":
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as scratch:
        train(int(sys.argv[1]) if len(sys.argv) > 1 else 200, Path(scratch))
