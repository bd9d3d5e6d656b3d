"""Draws docs/swap-trace.png: the lanes of one real step from disk, as they ran.

python benchmarks/swap/trace_step.py [--model gpt2-124m] [--memory 1400MB] [--out docs/swap-trace.png]
"""

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from barnraise.exchange.ledger.anchor import Anchor, initial_weights
from barnraise.formats import parse_bytes
from barnraise.planning.limits import Limits
from barnraise.planning.program import LaneName, Operation, OperationKind
from barnraise.planning.search import make_plan
from barnraise.spec import Recipe, preset
from barnraise.swap.engine import Engine
from barnraise.swap.hardware_probe import probe
from barnraise.swap.state_store import FragmentSequence, StateStore

COLOURS = {
    OperationKind.FORWARD: "#4c78a8", OperationKind.BACKWARD: "#1f4e79", OperationKind.HEAD: "#72b7b2", OperationKind.EMBED: "#9ecae9",
    OperationKind.EMBED_BACKWARD: "#9ecae9", OperationKind.UPDATE: "#f58518", OperationKind.NORM: "#bab0ac", OperationKind.READ: "#54a24b",
    OperationKind.FETCH: "#88d27a", OperationKind.WRITE: "#b279a2", OperationKind.STORE: "#d6a5c9", OperationKind.SPILL: "#e45756", OperationKind.LOAD: "#54a24b",
    OperationKind.OFFLOAD: "#e45756", OperationKind.COMMIT: "#000000",
}  # fmt: skip
LANES = [
    LaneName.READ,
    LaneName.IN,
    LaneName.COMPUTE,
    LaneName.OUT,
    LaneName.OPTIMIZER,
    LaneName.WRITE,
]


def recorded(
    model_name: str, memory: int, folder: Path
) -> list[tuple[str, Operation, float, float]]:
    """(lane, operation, began, ended) of the third step, in seconds."""
    model = replace(preset(model_name), context=512)
    hardware = probe(folder, cache=Path("build/hardware.json"))
    plan = make_plan(hardware, model, Limits(memory=memory, clipping="exact"), 4)
    store = StateStore(plan, folder if plan.on_disk else None)
    shelf = FragmentSequence(store, "anchor")
    for i, fragment in enumerate(model.fragments()):
        shelf[i] = initial_weights(fragment, 1)
    engine = Engine(plan, Recipe(), store, Anchor(shelf))
    spans: list[tuple[str, Operation, float, float]] = []
    for lane in engine.executor.lanes.values():
        lane.observe(lambda name, op, began, ended: spans.append((name, op, began, ended)))
    stir = torch.Generator().manual_seed(0)
    for step in range(3):
        spans.clear()
        batch = torch.randint(model.vocabulary, (4, model.context + 1), generator=stir)
        engine.step(list(batch.split(plan.sequences)), position=step + 1)
    engine.close()
    return [span for span in spans if isinstance(span[1], Operation)]


def draw(spans: list[tuple[str, Operation, float, float]], out: Path) -> None:
    start = min(began for _, _, began, _ in spans)
    used = [lane for lane in LANES if any(name == lane for name, *_ in spans)]
    figure, axes = plt.subplots(figsize=(12, 0.8 + 0.62 * len(used)), dpi=130)
    for row, lane in enumerate(reversed(used)):
        for name, op, began, ended in spans:
            if name == lane:
                axes.broken_barh(
                    [(began - start, max(ended - began, 0.002))],
                    (row - 0.38, 0.76),
                    color=COLOURS[op.kind],
                    linewidth=0,
                )
    axes.set_yticks(range(len(used)), [str(lane) for lane in reversed(used)])
    axes.set_xlabel("seconds")
    axes.set_xlim(0, max(ended for *_, ended in spans) - start)
    kinds = [kind for kind in COLOURS if any(op.kind is kind for _, op, *_ in spans)]
    patches = [Patch(color=COLOURS[kind], label=str(kind)) for kind in kinds]
    axes.legend(
        handles=patches,
        ncol=len(kinds),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        frameon=False,
        fontsize=8,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--memory", default="1400MB")
    parser.add_argument("--out", type=Path, default=Path("docs/swap-trace.png"))
    given = parser.parse_args()
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="trace-", dir="build"))
    try:
        draw(recorded(given.model, parse_bytes(given.memory), folder), given.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"drew {given.out}")


if __name__ == "__main__":
    main()
