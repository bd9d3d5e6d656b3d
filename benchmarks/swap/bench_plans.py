"""Price the programs of earlier plans and of today's side by side: `make bench-plans`.

    python benchmarks/swap/bench_plans.py           # print one line of JSON
    python benchmarks/swap/bench_plans.py --write   # write the section of docs/benchmarks/plans.md

Nothing is measured but the bits and the races, which a small model shows on a fake card. The
earlier plans (docs/benchmarks/plans_before.jsonl) are those of 2026-11-28, when what passes from
group to group waited in RAM with a plan's inputs, and with layer-wise clipping a group's gradients
and two more for AdamW. Both are priced by today's rules, and these are compared with what was
measured on an H200.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "worker"))

import plan_table

from barnraise.planning import cost_model
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan, tile_elements
from barnraise.planning.program import LaneName, Operation, OperationKind
from barnraise.planning.search import make_plan
from barnraise.planning.simulator import Price, StepSimulation
from barnraise.spec import ModelSpec, preset

GB = plan_table.GB
DOCUMENTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
EARLIER_PLANS = DOCUMENTS / "plans_before.jsonl"
MEASUREMENTS = DOCUMENTS / "gpu_h200.jsonl"
SEQUENCES = 16  # of a step
CARDS = (
    plan_table.Card("RTX 4060", 8, 1.0, 40, 256, 0),
    plan_table.Card("RTX 3060", 12, 1.1, 45, 360, 0),
    plan_table.Card("RTX 4060 Ti", 16, 1.1, 60, 288, 0),
    plan_table.Card("RTX 4090", 24, 1.2, 150, 1000, 0),
)
LINKS = {"PCIe 3": 12, "PCIe 4": 24}  # GB/s
MODELS = ("gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt3-1.3b", "gpt3-2.7b")
LARGE = "gpt3-1.3b"
# The H200's memory and its machine's, which its row of rates leaves out.
H200_BYTES, H200_FREE, H200_RAM = 150_109_880_320, 149_557_477_376, 128 << 30
# AdamW's parameters/s on the H200's host with tiles that all threads share, as the engine has had
# them since its steps were measured (docs/benchmarks/gpu.md).
SHARED_TILES_RATE = 1.80e9
OWN_TILE = 1 << 21  # elements of a thread's tile, when the H200's steps were measured
# The drill's model and the workers that took turns on the GPU.
DRILL_MODEL = ModelSpec(layers=8, width=256, heads=4, context=128, vocabulary=256)
DRILL_WORKERS = 2


class EarlierSteps(StepSimulation):
    """Steps whose flows between groups pass through RAM with the inputs.

    A group's first copy was begun when all before it was computed, so nothing hid it.
    """

    def _price(self, op: Operation) -> Price:
        price, plan, hardware = super()._price(op), self.plan, self.hardware
        if plan.boundaries != "host" or op.lane is not LaneName.COMPUTE:
            return price
        stream = cost_model.stream_bytes(plan.model, plan.sequences)
        sent, brought = stream / hardware.from_device, stream / hardware.to_device
        flows = plan.micro_batches - 1  # the last one stays until the next group begins
        # The first copy of a group ran while the last one went out, on the same RAM.
        both = (hardware.to_device + hardware.from_device) / hardware.stream
        first = brought * max(1.0, both) if flows else 0.0
        match op.kind:
            case OperationKind.FORWARD | OperationKind.EMBED_BACKWARD:
                moved_in, moved_out = flows * brought, 0.0
            case OperationKind.HEAD:
                moved_in, moved_out = flows * brought, plan.micro_batches * sent
            case OperationKind.BACKWARD:
                moved_in, moved_out = flows * brought, plan.micro_batches * sent
                first += brought
            case _:
                return price
        return replace(
            price,
            seconds=price.seconds + first,
            moved_in=price.moved_in + moved_in,
            moved_out=price.moved_out + moved_out,
        )


class MeasuredSteps(EarlierSteps):
    """Earlier steps as the H200 was measured with: each of the optimizer's threads had its tiles.

    A block's 24 take 14 threads two rounds.
    """

    def update_seconds(self, i: int, tile: int = -1) -> float:
        """Return the seconds of an update, whose last round leaves some threads idle."""
        seconds, plan = super().update_seconds(i, tile), self.plan
        if plan.updates_on_device(i):
            return seconds
        threads = cost_model.optimizer_threads(plan.threads)
        tiles = max(threads, -(-plan.fragments[i].size // OWN_TILE))
        return seconds * -(-tiles // threads) * threads / tiles


# ---- machines ------------------------------------------------------------------------------------


def describe_pc(card: plan_table.Card, link: int) -> Hardware:
    """Return a PC with a card, 128 GB of RAM and eight cores."""
    machine = plan_table.describe_machine(replace(card, link=link), 64)
    return replace(machine, memory=128 * GB, launches=150_000.0)


def read_h200(has_shared_tiles: bool = True) -> Hardware:
    """Return the measured H200, with AdamW as the engine has it now or as it was then."""
    (row,) = (row for row in read_lines(MEASUREMENTS) if row["part"] == "hardware")
    hardware = Hardware.from_json(json.dumps(row["rows"][0]))
    updates = tuple(
        replace(each, rate=SHARED_TILES_RATE)
        if has_shared_tiles and (each.where, each.dtype, each.bits) == ("host", "bfloat16", 32)
        else each
        for each in hardware.updates
    )
    return replace(
        hardware,
        updates=updates,
        device_memory=H200_BYTES,
        device_memory_free=H200_FREE,
        memory=H200_RAM,
        disk=1000 * GB,
        disk_size=1000 * GB,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- plans ---------------------------------------------------------------------------------------


def restore_plan(model: ModelSpec, threads: int, fields: dict[str, Any]) -> Plan:
    """Return an earlier plan from what is stored of it."""
    layers, last = model.layers, model.layers + 1
    group = fields.get("group", 1)
    forward = tuple(
        tuple(range(first, min(first + group, last))) for first in range(1, last, group)
    )
    on_card = set([0, last, *range(layers, 0, -1)][: fields["resident"]])
    tiers = tuple("device" if i in on_card else "host" for i in range(layers + 2))
    paged = layers - len(on_card - {0, last})
    waits = layers if fields["clipping"] == "exact" else group + 2
    return Plan(
        model=model,
        device="cuda",
        threads=threads,
        dtype="bfloat16",
        staged=True,
        sequences=fields["sequences"],
        micro_batches=fields["micro_batches"],
        forward_groups=forward,
        backward_groups=forward[::-1],
        kept_inputs="block" if group == 1 else "group",
        retained_blocks=fields.get("retained", fields.get("retained_blocks", 0)),
        boundaries=fields["boundaries"],
        weights=tiers,
        moments=tiers,
        clipping=fields["clipping"],
        slots=min(2 * group + 1, paged),
        gradient_slots=group + 1,
        host_gradient_slots=waits,
        ring=0,
        tile=tile_elements(model, whole=True),
    )


def tokens_per_second(plan: Plan, hardware: Hardware, steps: type[StepSimulation]) -> float:
    """Return a plan's speed by today's prices."""
    return plan.step_tokens / steps(plan, hardware).step_seconds


@dataclass(frozen=True)
class Comparison:
    """A model on a card: tokens/s of the earlier plan, of today's, and with all in memory."""

    card: str
    memory: int
    link: float
    model: str
    before: float
    after: float
    in_memory: float


def compare(row: dict[str, Any]) -> Comparison:
    """Price a stored plan and the one that the planner makes today."""
    limits = Limits()
    if row["card"] == "H200":
        hardware = read_h200()
        limits = Limits(device_memory=row["memory"] * GB if row["memory"] < 140 else None)
    else:
        (card,) = (each for each in CARDS if each.name == row["card"])
        hardware = describe_pc(card, row["link"])
    model = preset(row["model"])
    earlier = restore_plan(model, hardware.cores, row["plan"])
    today = make_plan(hardware, model, limits, SEQUENCES)
    unlimited = replace(hardware, device_memory=H200_BYTES, device_memory_free=H200_FREE)
    return Comparison(
        card=row["card"],
        memory=row["memory"],
        link=row["link"],
        model=row["model"],
        before=tokens_per_second(earlier, hardware, EarlierSteps),
        after=today.tokens_per_second,
        in_memory=make_plan(unlimited, model, Limits(), SEQUENCES).tokens_per_second,
    )


def compare_all() -> list[Comparison]:
    """Compare all stored plans with today's, on all processors."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(compare, read_lines(EARLIER_PLANS)))


# ---- what was measured ---------------------------------------------------------------------------


def price_measured_steps() -> Iterator[tuple[str, float, float]]:
    """Yield (name, priced seconds, measured seconds) of each recorded step."""
    hardware = read_h200(has_shared_tiles=False)
    rows = {row["part"]: row["rows"] for row in read_lines(MEASUREMENTS)}
    for row in rows["speed"]:
        plan = restore_plan(preset(row["model"]), hardware.cores, row["plan"])
        cap = f"{row['cap'] // GB} GB" if row["cap"] else "no limit"
        seconds = plan.step_tokens / row["tokens_per_second"]
        yield cap, MeasuredSteps(plan, hardware).step_seconds, seconds
    whole = rows["swarm"][0]["machines"]["whole"]
    layers = DRILL_MODEL.layers
    fields = {"sequences": 16, "micro_batches": 1, "clipping": "exact", "boundaries": "device"}
    fields |= {"resident": layers + 2, "retained": layers}
    plan = restore_plan(DRILL_MODEL, hardware.cores, fields)
    alone = StepSimulation(plan, hardware).step_seconds
    yield "6.4M, two workers on the card", DRILL_WORKERS * alone, whole["step_seconds"]


def count_saved_bytes() -> int:
    """Return the bytes of flows that no longer pass through RAM in a 24 GB step of the H200."""
    hardware, model = read_h200(), preset(LARGE)
    (row,) = (r for r in read_lines(EARLIER_PLANS) if (r["card"], r["memory"]) == ("H200", 24))
    earlier = restore_plan(model, hardware.cores, row["plan"])
    today = make_plan(hardware, model, Limits(device_memory=24 * GB), SEQUENCES)
    sizes: list[float] = []
    for plan, steps in ((earlier, EarlierSteps), (today, StepSimulation)):
        prices = [steps(plan, hardware).price(span.op) for span in steps(plan, hardware).spans]
        moved_in = sum(price.moved_in for price in prices) * hardware.to_device
        sizes.append(moved_in + sum(price.moved_out for price in prices) * hardware.from_device)
    return round(sizes[0] - sizes[1])


# ---- bits and races ------------------------------------------------------------------------------


def check_programs() -> tuple[bool, int]:
    """Return whether a small model's swapped steps have the resident bits, and count the races."""
    # The folder of the tests' helpers is no import path of the type checker.
    from helpers.cuda import card_plans, cuda_stub  # pyright: ignore[reportMissingImports]

    model = ModelSpec(layers=5, width=64, heads=2, context=16, vocabulary=256)
    races = 0
    with cuda_stub.card_process() as process:
        for clipping in ("exact", "layer"):
            for changes in (dict(), dict(near_inputs=2, host_gradient_slots=5)):
                plan = card_plans.card_plan(
                    model,
                    resident=3,
                    clipping=clipping,
                    boundaries="host",
                    micro_batches=3,
                    sequences=2,
                    **changes,
                )
                for behind in (False, True):
                    found = process.submit(card_plans.find_races, plan, Path(), behind).result()
                    races += len(found)
    return _have_equal_bits(model), races


def _have_equal_bits(model: ModelSpec) -> bool:
    import bitwise

    resident = bitwise.resident_plan(model, 3)
    for clipping in ("exact", "layer"):
        reference = bitwise.run_plan(replace(resident, clipping=clipping), 6)
        for near in (0, 2):
            plan = replace(
                resident,
                clipping=clipping,
                staged=True,
                slots=3,
                host_gradient_slots=model.layers,
                boundaries="host",
                near_inputs=near,
            )
            if not bitwise.equal_bits(bitwise.run_plan(plan, 6), reference):
                return False
    return True


# ---- the document --------------------------------------------------------------------------------


def format_section(rows: list[Comparison], prices: list[tuple[str, float, float]]) -> str:
    """Return the section of the document."""
    lines = [
        plan_table.PROGRAMS_HEADING,
        "",
        "By `make bench-plans`: tokens/s with the programs of 2026-11-28 → with today's, both by",
        f"today's prices; {SEQUENCES} sequences a step, 128 GB of RAM. In brackets: of the speed",
        "with everything on the card, if it had the memory. The H200's rates are measured.",
        "",
        f"| card | model | {' | '.join(LINKS)} |",
        "|---|---|---|---|",
    ]
    cells = {(row.card, row.model, row.link): row for row in rows}
    for card in CARDS:
        for model in MODELS:
            texts = [_format_cell(cells[card.name, model, link]) for link in LINKS.values()]
            lines.append(f"| {card.name}, {card.memory} GB | {model} | {' | '.join(texts)} |")
    for row in rows:
        if row.card == "H200" and row.memory < 140:
            lines.append(f"| H200, {row.memory} GB | {row.model} | | {_format_cell(row)} |")
    lines += ["", "| measured on the H200 | priced | measured | error |", "|---|---|---|---|"]
    for name, priced, measured in prices:
        error = f"{priced / measured - 1:+.0%}"
        lines.append(f"| {name} | {priced:.3f} s | {measured:.3f} s | {error} |")
    return "\n".join(lines) + "\n"


def _format_cell(row: Comparison) -> str:
    before, after = (plan_table.round_rate(rate) for rate in (row.before, row.after))
    return f"{before}→{after} ({row.after / row.in_memory:.2f})"


def main() -> None:
    """Print the figures as JSON; with --write, write the document's section as well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the document's section")
    arguments = parser.parse_args()
    rows, prices = compare_all(), list(price_measured_steps())
    if arguments.write:
        plan_table.write_section(format_section(rows, prices))
    ratios = {row.memory: row.after / row.in_memory for row in rows if row.card == "H200"}
    bits_equal, races = check_programs()
    print(
        json.dumps(
            {
                "cards": len(rows),
                "faster": sum(row.after > row.before for row in rows),
                "ratio_24gb_1p3b": round(ratios[24], 3),
                "ratio_8gb_1p3b": round(ratios[8], 3),
                "in_ram_bytes_saved": count_saved_bytes(),
                "planner_errors": [round(p / m - 1, 3) for _, p, m in prices],
                "races": races,
                "bits_equal": bits_equal,
            }
        )
    )


if __name__ == "__main__":
    main()
