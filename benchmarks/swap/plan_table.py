"""Plan presets on a table of GPUs and memories: the table of docs/benchmarks/plans.md.

    python benchmarks/swap/plan_table.py           # print what differs from the document
    python benchmarks/swap/plan_table.py --write   # write the document
    python benchmarks/swap/plan_table.py --all     # print every preset and memory; some minutes

Nothing is measured: the rates of the cards are assumed, so that a reviewer can see what the planner
decides on machines that are not here. tests/worker/planning/test_plan_table.py checks the rules
that every row must obey, and that the document is what this script writes.
"""

import argparse
import difflib
import itertools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "worker"))

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning.hardware import Hardware, UpdateRate
from barnraise.planning.plan import Plan
from barnraise.planning.search import WRITES_LIMIT, make_plan
from barnraise.spec import PRESETS, preset

GB = 10**9
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "plans.md"
SEQUENCES = 8  # of a step
MEMORIES = (16, 32, 64, 128, 256, 512)  # GB of RAM
SHOWN_MEMORIES = (16, 32, 64, 256)  # of those, in the document
SHOWN_MODELS = ("gpt2-124m", "gpt2-1.5b", "gpt3-13b")
FREE_DISK, DRIVE = 800 * GB, 1000 * GB


@dataclass(frozen=True)
class Card:
    """A GPU, by rates that such a card sustains.

    Attributes:
        name: what it is called.
        memory: GB in all.
        taken: GB that CUDA's context and, on a PC, the desktop take.
        teraflops: bf16 TFLOP/s.
        bandwidth: GB/s of its memory.
        link: GB/s between it and RAM.
    """

    name: str
    memory: int
    taken: float
    teraflops: float
    bandwidth: float
    link: float


CARDS = (
    Card("RTX 3050 laptop", 4, 0.9, 20, 190, 12),
    Card("RTX 4060 laptop", 8, 1.0, 40, 256, 12),
    Card("RTX 3060", 12, 1.1, 45, 360, 12),
    Card("RTX 4060 Ti", 16, 1.1, 60, 288, 12),
    Card("RTX 4090", 24, 1.2, 150, 1000, 24),
    Card("H100", 80, 0.6, 600, 3300, 50),
)


def describe_machine(card: Card, memory: int) -> Hardware:
    """Return a PC or a server with a card and `memory` GB of RAM; more RAM is faster RAM."""
    flops, bandwidth = card.teraflops * 1e12, card.bandwidth * 1e9
    stream = 35e9 if memory <= 32 else 55e9 if memory <= 64 else 150e9
    host = stream / 28
    host_updates = (("float32", 32, 1.0), ("bfloat16", 32, 0.6))
    device_bytes = (("float32", 32, 28), ("bfloat16", 32, 50))
    return Hardware(
        device="cuda",
        name=f"{card.name}, {memory} GB",
        cores=8 if memory <= 64 else 16,
        memory=memory * GB,
        device_memory=card.memory * GB,
        device_memory_free=int((card.memory - card.taken) * GB),
        disk=FREE_DISK,
        disk_size=DRIVE,
        dtype="bfloat16",
        matmul=((512, 0.5 * flops), (1024, 0.8 * flops), (2048, flops)),
        attention=0.5 * flops,
        attention_backward=0.4 * flops,
        elementwise=0.75 * bandwidth,
        to_device=card.link * 1e9,
        from_device=card.link * 1e9,
        stream=stream,
        adam=host,
        disk_read=5e9,
        disk_write=3e9,
        updates=(
            *(UpdateRate("host", dtype, bits, part * host) for dtype, bits, part in host_updates),
            *(
                UpdateRate("device", dtype, bits, 0.75 * bandwidth / size)
                for dtype, bits, size in device_bytes
            ),
        ),
    )


@dataclass(frozen=True)
class Cell:
    """What the planner decides for a model on a machine.

    Attributes:
        card: the GPU.
        memory: GB of RAM.
        model: a preset.
        plan: the plan; None if it is refused.
        refusal: why.
    """

    card: Card
    memory: int
    model: str
    plan: Plan | None
    refusal: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Return the predicted speed; 0 if the model is refused."""
        if self.plan is None:
            return 0.0
        return SEQUENCES * self.plan.model.context / self.plan.step_seconds


def compute_cell(place: tuple[Card, int, str]) -> Cell:
    """Plan a preset on a card with so many GB of RAM."""
    card, memory, model = place
    try:
        hardware = describe_machine(card, memory)
        plan = make_plan(hardware, preset(model), step_sequences=SEQUENCES, advise=False)
    except PlanError as error:
        return Cell(card, memory, model, None, str(error))
    return Cell(card, memory, model, plan)


def compute_cells(
    cards: Iterable[Card] = CARDS,
    memories: Iterable[int] = MEMORIES,
    models: Iterable[str] = PRESETS,
) -> Iterator[Cell]:
    """Plan every model on every machine, on all cores."""
    with ProcessPoolExecutor() as pool:
        yield from pool.map(compute_cell, itertools.product(cards, memories, models), chunksize=4)


# ---- the document --------------------------------------------------------------------------------

PROGRAMS_HEADING = "## Programs before and after"  # of the section that bench_plans.py writes
HEADING = """# What the planner decides on GPUs

**No row of the table is a measurement.** Of the three large steps that one card, an H200, has been
measured with, prices are 3 to 9 % too fast, and of a small one 8 %
([below](#programs-before-and-after)). No other card has been measured.

Written by `python benchmarks/swap/plan_table.py --write`; do not edit. `--all` prints every preset
and memory. The rates of the cards are assumed; all else is the planner's own arithmetic. Every step
has 8 sequences of the preset's context, the drive has 1 TB with 800 GB free, and nobody has set a
limit.

Each cell says: predicted tokens/s; where the training state is (*GPU*: all of it; *n on GPU*: so
many fragments, the others in RAM; *RAM*; *disk*: weights or moments are read from disk); and what a
plan on disk writes a day, where 300 GB is the limit that slows it. Other plans are limited by
compute unless they say by what. A dash is a refusal: the model does not fit, or one step would
write more than that.
"""


def format_cell(cell: Cell) -> str:
    """Return a cell of the table."""
    plan = cell.plan
    if plan is None:
        return "–"
    resident = plan.weights.count("device")
    if "disk" in (*plan.weights, *plan.moments):
        where = "disk"
    elif resident == len(plan.weights):
        where = "GPU"
    else:
        where = f"{resident} on GPU" if resident else "RAM"
    text = f"{round_rate(cell.tokens_per_second)}, {where}"
    if plan.bottleneck not in ("compute", WRITES_LIMIT):
        text += f"; {plan.bottleneck}"
    if plan.written_per_day:
        text += f", {format_bytes(plan.written_per_day)}/day"
    return text


def round_rate(rate: float) -> str:
    """Return a rate with two digits, so that small changes of the arithmetic are not seen."""
    digits = 2 - len(str(int(rate))) if rate >= 1 else 2
    return f"{round(rate, digits):,.0f}" if rate >= 1 else f"{rate:.2g}"


def format_document(cells: Iterable[Cell]) -> str:
    """Return the document that shows the cells, in the order of `compute_cells`."""
    lines = [HEADING]
    lines += ["| card | memory | taken | bf16 | its memory | link |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {card.name} | {card.memory} GB | {card.taken} GB | {card.teraflops:g} TFLOP/s "
        f"| {card.bandwidth:g} GB/s | {card.link:g} GB/s |"
        for card in CARDS
    ]
    return "\n".join(lines) + "\n\n" + format_table(cells)


def format_table(cells: Iterable[Cell]) -> str:
    """Return the table of the cells: a row for each card and preset, a column for each memory."""
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.card.name, cell.model), []).append(cell)
    memories = [cell.memory for cell in next(iter(rows.values()))]
    heads = " | ".join(f"{memory} GB of RAM" for memory in memories)
    lines = [f"| card | preset | {heads} |", "|---" * (2 + len(memories)) + "|"]
    for (card, model), row in rows.items():
        lines.append(f"| {card} | {model} | " + " | ".join(map(format_cell, row)) + " |")
    return "\n".join(lines) + "\n"


def read_parts() -> tuple[str, str]:
    """Return what this script writes of the document, and the section of `bench_plans.py`."""
    text, heading, section = DOCUMENT.read_text().partition(f"\n{PROGRAMS_HEADING}")
    return text, heading + section


def write_section(section: str) -> None:
    """Write the section of `bench_plans.py` behind the rest of the document."""
    DOCUMENT.write_text(f"{read_parts()[0]}\n{section}")


def main() -> None:
    """Write the document, or print how it differs from what is written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the document")
    parser.add_argument("--all", action="store_true", help="print every preset and memory")
    arguments = parser.parse_args()
    if arguments.all:
        print(format_table(compute_cells()), end="")
        return
    text = format_document(compute_cells(memories=SHOWN_MEMORIES, models=SHOWN_MODELS))
    old, section = read_parts()
    if arguments.write:
        DOCUMENT.write_text(text + section)
        return
    difference = list(difflib.unified_diff(old.splitlines(), text.splitlines(), lineterm=""))
    print("\n".join(difference))
    sys.exit(bool(difference))


if __name__ == "__main__":
    main()
