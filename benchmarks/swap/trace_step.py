"""Draw docs/swap-trace.png: the lanes of one real step from disk, as they ran.

python benchmarks/swap/trace_step.py [--model gpt2-124m] [--memory 1400MB]
"""

import argparse
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from barnraise.formats import parse_bytes
from barnraise.ledger.anchor import Anchor, initial_weights
from barnraise.planning.limits import UNLIMITED, Limits
from barnraise.planning.program import LaneName, Operation, OperationKind
from barnraise.planning.search import make_plan
from barnraise.spec import Recipe, preset
from barnraise.swap.engine import Engine
from barnraise.swap.hardware_probe import probe
from barnraise.swap.state_store import FragmentSequence, StateStore

COLOURS = {
    OperationKind.FORWARD: "#4c78a8",
    OperationKind.BACKWARD: "#1f4e79",
    OperationKind.HEAD: "#72b7b2",
    OperationKind.EMBED: "#9ecae9",
    OperationKind.EMBED_BACKWARD: "#9ecae9",
    OperationKind.UPDATE: "#f58518",
    OperationKind.NORM: "#bab0ac",
    OperationKind.READ: "#54a24b",
    OperationKind.FETCH: "#88d27a",
    OperationKind.WRITE: "#b279a2",
    OperationKind.STORE: "#d6a5c9",
    OperationKind.SPILL: "#e45756",
    OperationKind.LOAD: "#54a24b",
    OperationKind.OFFLOAD: "#e45756",
    OperationKind.COMMIT: "#000000",
}
LANES = [
    LaneName.READ,
    LaneName.IN,
    LaneName.COMPUTE,
    LaneName.OUT,
    LaneName.OPTIMIZER,
    LaneName.WRITE,
]
SEQUENCES = 4
CONTEXT = 512
MIN_BAR_SECONDS = 0.002  # so that a short operation is visible


@dataclass(frozen=True)
class Span:
    """One operation as it ran, in seconds of one clock."""

    lane: str
    operation: Operation
    started: float
    ended: float


def record_step(model_name: str, memory: int, folder: Path) -> list[Span]:
    """Train three steps within `memory` bytes and return the operations of the third."""
    model = replace(preset(model_name), context=CONTEXT)
    hardware = probe(folder, cache=Path("build/hardware.json"))
    limits = Limits(
        memory=memory, clipping="exact", crash_safety="exact", disk_writes_per_day=UNLIMITED
    )
    plan = make_plan(hardware, model, limits, SEQUENCES)
    store = StateStore(plan, folder if plan.on_disk else None)
    anchor = FragmentSequence(store, "anchor")
    for i, fragment in enumerate(model.fragments()):
        anchor[i] = initial_weights(fragment, 1)
    engine = Engine(plan, Recipe(), store, Anchor(anchor))
    spans: list[Span] = []

    def observe(lane: str, label: object, started: float, ended: float) -> None:
        if isinstance(label, Operation):
            spans.append(Span(lane, label, started, ended))

    for lane in engine.executor.lanes.values():
        lane.observe(observe)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        spans.clear()
        shape = (SEQUENCES, model.context + 1)
        batch = torch.randint(model.vocabulary, shape, generator=generator)
        engine.step(list(batch.split(plan.sequences)), position=step + 1)
    engine.close()
    return spans


def draw(spans: list[Span], out: Path) -> None:
    """Draw a row for each lane that ran an operation."""
    start = min(span.started for span in spans)
    used_lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    figure, axes = plt.subplots(figsize=(12, 0.8 + 0.62 * len(used_lanes)), dpi=130)
    for row, lane in enumerate(reversed(used_lanes)):
        for span in spans:
            if span.lane == lane:
                duration = max(span.ended - span.started, MIN_BAR_SECONDS)
                axes.broken_barh(
                    [(span.started - start, duration)],
                    (row - 0.38, 0.76),
                    color=COLOURS[span.operation.kind],
                    linewidth=0,
                )
    axes.set_yticks(range(len(used_lanes)), [str(lane) for lane in reversed(used_lanes)])
    axes.set_xlabel("seconds")
    axes.set_xlim(0, max(span.ended for span in spans) - start)
    kinds = [kind for kind in COLOURS if any(span.operation.kind is kind for span in spans)]
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
    """Record and draw a step with the model and memory of the command line."""
    parser = argparse.ArgumentParser(description="Draw the lanes of one real step from disk.")
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--memory", default="1400MB")
    parser.add_argument("--out", type=Path, default=Path("docs/swap-trace.png"))
    arguments = parser.parse_args()
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="trace-", dir="build"))
    try:
        memory = parse_bytes(arguments.memory)
        draw(record_step(arguments.model, memory, folder), arguments.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"drew {arguments.out}")


if __name__ == "__main__":
    main()
